"""Is it right, what if, what if it breaks: certificates, forecasts, chaos.

May import lab and below.
"""
