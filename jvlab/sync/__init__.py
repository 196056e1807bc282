"""From a tree to a verified version: mapping, plan, `Link`, its channels, transaction, stepper, teams, reports, and the
bisector (`diagnose`), which says why engine and trainer disagree.

May import trainer and below.
"""
