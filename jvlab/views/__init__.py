"""What a person sees, without widgets: text, HTML, SVG, figures.

Registers faces for objects of lower rooms; those never import it.
"""
