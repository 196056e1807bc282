"""Messages and how they travel: proto, stubs, channels, credentials, clients.

May import transport, record and below.
"""
