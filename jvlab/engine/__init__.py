"""Everything that touches vLLM: one engine's process here, what runs inside its workers in worker/, where its
loader puts each tensor in tracing/.

May import transport and below.
"""

from jvlab.engine import _iri_grammar

# before any module in here imports vLLM
_iri_grammar.when_used()
