// One block of a pool to another place of the same pool, in words.

struct Params {
    words: u32,
    src_start: u32,
    dst_start: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read_write> pool: array<u32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i < p.words {
        pool[p.dst_start + i] = pool[p.src_start + i];
    }
}
