"""What would go where: `jv.plan`, `Mapping`, and whether numbers mean what a mapping says.

May import panels and below.
"""
