"""Interactive widgets, with their JavaScript in static/. May import views and below."""
