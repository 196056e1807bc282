"""Messages and how they travel: proto, stubs, channels, credentials, clients; processes of this host in
processes/.

May import record and below.
"""

import os as _os

# With gRPC's own fork handlers (on by default in 1.85) a third of the processes that a script forks while its lab is
# open, such as the workers of a torch DataLoader, end in a segmentation fault. Without, they run; none of them may use
# the lab, with or without.
_os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
