"""Everything that touches vLLM: one engine's process here, what runs inside its workers in worker/, where its
loader puts each tensor in tracing/.

May import transport and below.
"""
