"""Messages and how they travel: proto, stubs, channels, credentials, clients; processes of this host in
processes/.

May import record and below.
"""
