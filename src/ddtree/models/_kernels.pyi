# The binding in native/_kernels.c; ddtree.models.kernels is its only user.

def supported() -> bool: ...
def linear(
    x: int, packed: int, bias: int, y: int, m: int, n: int, k: int, num_threads: int, /
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
def rms_norm(x: int, weight: int, y: int, m: int, d: int, eps: float, /) -> None: ...
def swiglu(gate: int, up: int, y: int, count: int, num_threads: int, /) -> None: ...
