"""Checks the formats against the published byte vectors and counts. python3 tools/oracle/selftest.py"""
import numpy as np

import formats as f


def main():
    x = np.zeros((4, 16), np.float32)
    ladder = [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]
    x[1] = ladder + [-v for v in ladder]
    x[2] = [3000, -3000] * 8
    x[3] = f.round_bf16((3.1 * np.sin(0.7 * np.arange(16))).astype(np.float32))
    x[2] = f.round_bf16(x[2])
    packed, scales = f.nvfp4_insert(x)
    want = ["00" * 8, "67462402efceac0a", "f7" * 8, "6077c4ff0e7647fc"]
    assert [p.tobytes().hex() for p in packed] == want
    assert scales[:, 0].tobytes().hex() == "01387e30"

    table = f.E4M3[f.readback_table()[1:0x7F, :8]]
    assert (table != f.E4M3[1:0x7F, None] * f.E2M1[None, :8]).sum() == 275 and table.size == 1008
    assert (f.readback_table()[0x7F] == 0x7F).all()

    finite = [b for b in range(256) if b & 0x7F != 0x7F]
    assert (f.e4m3_bytes(f.E4M3[finite]) == finite).all()
    mid = (f.E4M3[:0x7E] + f.E4M3[1:0x7F]) / 2            # exact ties go to the even byte
    assert all(b % 2 == 0 for b in f.e4m3_bytes(mid))
    assert (f.e4m3_bytes(np.float32([464, 1e9, np.inf, -np.inf, np.nan])) == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F]).all()
    assert (f.bf16_bits(np.float32([1.00390625, 1.01171875, 3.4e38])) == [0x3F80, 0x3F82, 0x7F80]).all()

    w = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    assert abs(f.mxfp8_weight(*f.mxfp8_encode(w)) - w).max() <= abs(w).max() / 16
    g = 2688 / abs(w).max()
    assert abs(f.nvfp4_weight(*f.nvfp4_weight_encode(w, g), g) - w).max() < abs(w).max() / 5
    print("formats: ok")


if __name__ == "__main__":
    main()
