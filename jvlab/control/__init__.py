"""Who is alive, which version they hold, what happens next: proto, gateway, client, state machines."""
