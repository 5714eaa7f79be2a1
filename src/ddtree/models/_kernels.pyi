# The binding in native/_kernels.c. Its users are ddtree.models.kernels and, of `paged_attention`,
# ddtree.serving.paged_attention.

def supported() -> bool: ...
def linear(
    x: int,
    packed: int,
    bias: int,
    y: int,
    m: int,
    n: int,
    k: int,
    num_threads: int,
    lanes: int,
    /,
) -> None: ...
def pairs_supported() -> bool: ...
def linear_pairs(
    x: int,
    packed: int,
    bias: int,
    y: int,
    m: int,
    n: int,
    k: int,
    num_threads: int,
    /,
) -> None: ...
def attention(
    query: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    mask: tuple[int, ...],
    out: int,
    requests_rows_keys_open: tuple[int, int, int, int],
    heads_kv_heads_width: tuple[int, int, int],
    scale: float,
    num_threads: int,
    /,
) -> None: ...
def paged_attention(
    query_keys_values_caches_out: tuple[tuple[int, ...], ...],
    starts_rows_contexts: tuple[int, int, int],
    block_tables: tuple[int, int],
    ancestor_words: tuple[int, int],
    requests_heads_kv_heads_width_block_size: tuple[int, int, int, int, int],
    scale: float,
    num_threads: int,
    /,
) -> None: ...
def rms_norm(x: int, weight: int, y: int, m: int, d: int, eps: float, /) -> None: ...
def swiglu(gate: int, up: int, y: int, count: int, num_threads: int, /) -> None: ...
