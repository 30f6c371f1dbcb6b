//! Pages straight from the system.

use ferrum_simd::memory::pages::{Pages, interleave_thread, node_bits, set_policy};
use ferrum_simd::threads::topology;
use ferrum_test_support::skip;

/// What pages are worth a mapping from, and the most bytes of a mapping that several pieces share.
const GRAIN: usize = 64 << 10;
const SHARED: usize = 64 << 20;

/// The bytes of a piece.
fn bytes(pages: &mut Pages, len: usize) -> &mut [u8] {
    // SAFETY: the piece has `len` bytes, and the borrow of it keeps others away.
    unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr(), len) }
}

#[test]
fn pages_come_from_nodes_in_turns() {
    let nodes = topology::nodes();
    if nodes.is_empty() {
        skip("the system tells of no memory nodes");
        return;
    }
    let size = 5 << 20;
    let mut pages = match Pages::on_nodes(size, &node_bits(&nodes)) {
        Ok(pages) => pages,
        Err(error) => return skip(error),
    };
    // A mapping begins a little before its first huge page.
    let start = pages.start().as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let begin = |line: &str| usize::from_str_radix(line.split(' ').next()?, 16).ok();
    let before = maps
        .lines()
        .filter(|line| begin(line).is_some_and(|at| at <= start));
    match before.max_by_key(|line| begin(line)) {
        Some(line) => assert!(line.contains("interleave:"), "{line}"),
        None => skip("numa_maps does not tell of the mapping"),
    }
    // No node of that number: refused, and nothing else happens.
    assert!(Pages::on_nodes(size, &node_bits(&[1023])).is_err());
    let bytes = bytes(&mut pages, size);
    assert!(bytes.iter().all(|b| *b == 0));
    bytes.fill(1);
    assert_eq!(node_bits(&[0, 65, 5000])[..2], [1, 2]);
}

#[test]
fn a_thread_allocates_on_nodes_in_turns() {
    let nodes = topology::nodes();
    if nodes.is_empty() {
        skip("the system tells of no memory nodes");
        return;
    }
    // Policies belong to threads, and this one ends.
    let set = |nodes| std::thread::spawn(move || set_policy(&nodes));
    match set(node_bits(&nodes)).join().unwrap() {
        Ok(()) => assert!(
            set(node_bits(&[1023])).join().unwrap().is_err(),
            "no such node"
        ),
        Err(error) => skip(error),
    }
    interleave_thread();
}

#[test]
fn pieces_are_zeroed_apart_and_outlive_their_neighbours() {
    assert!(Pages::zeroed_for_weights(GRAIN - 1).is_none());
    let sizes = [
        GRAIN,
        3 * GRAIN + 1,
        5 << 20,
        SHARED / 2,
        SHARED / 2 + 1,
        17 << 20,
        1 << 20,
    ];
    for round in 1..4u8 {
        let mut pieces: Vec<_> = sizes
            .iter()
            .map(|&len| (Pages::zeroed_for_weights(len).unwrap().unwrap(), len))
            .collect();
        for (i, (piece, len)) in pieces.iter_mut().enumerate() {
            let bytes = bytes(piece, *len);
            assert!((bytes.as_ptr() as usize).is_multiple_of(64));
            assert!(bytes.iter().all(|b| *b == 0), "round {round}, piece {i}");
            bytes.fill(round * 16 + i as u8);
        }
        while !pieces.is_empty() {
            for (piece, len) in &mut pieces {
                let bytes = bytes(piece, *len);
                let first = bytes[0];
                assert!(bytes.iter().all(|b| *b == first) && first / 16 == round);
            }
            pieces.remove(pieces.len() / 2);
        }
    }
}
