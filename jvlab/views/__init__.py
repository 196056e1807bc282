"""Text, HTML, SVG and figures, without widgets.

Registers views for objects of lower rooms; those never import it.
"""
