"""Is it right, what if: certificates, forecasts.

May import lab and below.
"""
