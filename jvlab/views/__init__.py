"""Every picture: text, HTML, SVG and figures here, widgets in panels/.

May import gateway and below; registers views for objects of lower rooms, which never import it.
"""
