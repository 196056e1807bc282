"""From a tree to a verified version: mapping, plan, `Link`, its channels, transaction, stepper, teams, reports.

May import trainer and below.
"""
