"""What a person sees and clicks: widgets with JavaScript of their own. May import views and below."""
