"""`jv.certify`: checks of a running engine configuration, each with what it saw.

May import lab and below.
"""
