// dst[dst_start..][..bytes] = src[src_start..][..bytes] at any byte offsets. A lane owns one word of dst and
// leaves those of its bytes alone that are outside the range.

struct Params {
    src_start: u32,
    dst_start: u32,
    bytes: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> src: array<u32>;
@group(1) @binding(1) var<storage, read_write> dst: array<u32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let word = p.dst_start / 4u + element_of(at);
    if word * 4u >= p.dst_start + p.bytes {
        return;
    }
    var value = dst[word];
    for (var b = 0u; b < 4u; b++) {
        let byte = word * 4u + b;
        if byte >= p.dst_start && byte < p.dst_start + p.bytes {
            let s = byte - p.dst_start + p.src_start;
            let taken = extractBits(src[s / 4u], (s % 4u) * 8u, 8u);
            value = insertBits(value, taken, b * 8u, 8u);
        }
    }
    dst[word] = value;
}
