"""What a training pass holds, by hand, and what is chosen from it."""

from ragen.model import activations
from ragen.model.activations import chunk_rows, fewest_recomputed, fitting_tokens, layer_bytes, pass_bytes
from ragen.model.decoder import Shape

QWEN_3B = Shape(151936, 2048, 11008, 36, 16, 2, 128, 1e6, 1e-6, True, True)
GB = 10**9


def test_a_layer_of_3b_by_hand():
    """Two residuals and two norms; q, k, v and what attention mixed; gate, up and their product; float32 per head."""
    assert layer_bytes(QWEN_3B, 2) == 2 * (4 * 2048 + (2048 + 2 * 256) + 2048 + 3 * 11008) + 4 * 18


def test_recomputed_layers_keep_their_input_only():
    none, some, every = (pass_bytes(QWEN_3B, 8192, 0, number, 2) for number in (0, 10, 36))
    assert none - some == 10 * 8192 * (layer_bytes(QWEN_3B, 2) - 2 * 2048)
    assert every < 0.2 * none


def test_only_as_many_layers_as_memory_asks_for():
    """8,192 tokens of a 3B model keep 27 GB without recomputing; with 100 GB nothing is recomputed."""
    chosen = [fewest_recomputed(QWEN_3B, 8192, 2700, 2, free * GB) for free in (100, 30, 20, 10, 1)]
    assert chosen[0] == 0 and chosen == sorted(chosen) and 0 < chosen[2] < 36 and chosen[-1] == 36
    for number, free in zip(chosen[1:4], (30, 20, 10), strict=True):
        assert activations.fits(pass_bytes(QWEN_3B, 8192, 2700, number, 2), free * GB)
        assert number == 0 or not activations.fits(pass_bytes(QWEN_3B, 8192, 2700, number - 1, 2), free * GB)


def test_micro_batches_shrink_before_layers_are_recomputed():
    def tokens(free, recomputes=True):
        return fitting_tokens(QWEN_3B, 16_000, 2, free * GB, recomputes)

    assert tokens(100) == 16_000
    assert 4096 < tokens(30) < 9000 and tokens(30) % 512 == 0
    assert tokens(15) == 4096 and tokens(15, recomputes=False) < 4096
    assert tokens(1) == 512


def test_chunks_are_equal():
    assert [chunk_rows(rows, 100, 1000) for rows in (1, 10, 11, 25)] == [1, 10, 6, 9]
    assert chunk_rows(5, 5000, 1000) == 1
