"""Is it right, why not, what if: certificates, the bisector, forecasts.

May import lab and below.
"""
