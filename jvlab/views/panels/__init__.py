"""Interactive widgets, with their JavaScript in static/. May import what views may."""
