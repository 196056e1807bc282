"""Which leaf goes where: `jv.plan`, `Mapping`, and checks that a mapping is right.

May import panels and below.
"""
