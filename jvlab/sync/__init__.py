"""The trainer's half of a sync: `Link`, its channels, transaction, stepper, teams, reports, senders.

May import diagnose and below.
"""
