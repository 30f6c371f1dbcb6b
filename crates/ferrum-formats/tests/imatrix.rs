//! Importance matrices in both formats, wrong ones included.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_formats::gguf::{ArrayBuf, Gguf, Writer};
use ferrum_formats::{Imatrix, Result};
use ferrum_types::GgufQuantType;
use proptest::prelude::*;
use std::path::Path;

fn entry(name: &str, calls: i32, values: &[f32]) -> Vec<u8> {
    let mut out = (name.len() as i32).to_le_bytes().to_vec();
    out.extend(name.as_bytes());
    out.extend(calls.to_le_bytes());
    out.extend((values.len() as i32).to_le_bytes());
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    out
}

fn list(entries: &[Vec<u8>], tail: &[u8]) -> Vec<u8> {
    let count = (entries.len() as i32).to_le_bytes();
    [&count[..], &entries.concat(), tail].concat()
}

fn read(bytes: &[u8]) -> Result<Imatrix> {
    Imatrix::from_list(Path::new("imatrix.dat"), bytes)
}

#[test]
fn the_older_format_gives_means() {
    let entries = [
        entry("blk.0.attn_q.weight", 4, &[4.0, 8.0]),
        entry("output.weight", 0, &[3.0, 5.0, 7.0]),
    ];
    let tail = [&7i32.to_le_bytes()[..], &4i32.to_le_bytes(), b"wiki"].concat();
    let found = read(&list(&entries, &tail)).unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(found.get("blk.0.attn_q.weight"), Some(&[1.0, 2.0][..]));
    assert_eq!(found.get("output.weight"), Some(&[1.0, 1.0, 1.0][..]));
    assert_eq!(found.get("token_embd.weight"), None);
    assert_eq!(
        (found.chunks, found.dataset.as_deref()),
        (Some(7), Some("wiki"))
    );
    let bare = read(&list(&entries, &[])).unwrap();
    assert_eq!((bare.chunks, bare.dataset), (None, None));
}

#[test]
fn the_older_format_is_not_trusted() {
    let good = entry("a", 1, &[1.0]);
    let one = list(std::slice::from_ref(&good), &[]);
    let cases: &[(&str, Vec<u8>, &str)] = &[
        (
            "many entries",
            i32::MAX.to_le_bytes().to_vec(),
            "2147483647 in the entries",
        ),
        (
            "fewer than none",
            (-1i32).to_le_bytes().to_vec(),
            "found -1",
        ),
        ("cut", one[..18].to_vec(), "0 to 0"),
        (
            "no name",
            list(&[entry("", 1, &[1.0, 2.0])], &[]),
            "0 bytes",
        ),
        (
            "twice",
            list(&[good.clone(), good.clone()], &[]),
            "more than once",
        ),
        (
            "not a number",
            list(&[entry("a", 1, &[f32::NAN])], &[]),
            "NaN",
        ),
        ("negative", list(&[entry("a", 1, &[-1.0])], &[]), "-1"),
        ("negative calls", list(&[entry("a", -3, &[1.0])], &[]), "-3"),
        (
            "no values",
            list(&[entry("a\0\0\0\0", 1, &[])], &[]),
            "0 values",
        ),
    ];
    for (what, bytes, part) in cases {
        let error = read(bytes).unwrap_err().to_string();
        assert!(error.starts_with("imatrix.dat: "), "{what}: {error}");
        assert!(error.contains(part), "{what}: {error}");
    }
}

fn gguf(kind: &str, sums: &[f32], counts: &[f32]) -> Gguf {
    let bytes = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut w = Writer::new("imatrix.gguf");
    w.set("general.type", kind).unwrap();
    w.set("imatrix.chunk_count", 3u32).unwrap();
    w.set("imatrix.datasets", &ArrayBuf::from_strs(["wiki"]))
        .unwrap();
    let parts = counts.len();
    w.declare(
        "x.weight.in_sum2",
        &[parts, sums.len() / parts],
        GgufQuantType::F32,
    )
    .unwrap();
    w.declare("x.weight.counts", &[parts, 1], GgufQuantType::F32)
        .unwrap();
    let mut body = w.start(Vec::new()).unwrap();
    body.push("x.weight.in_sum2", &bytes(sums)).unwrap();
    body.push("x.weight.counts", &bytes(counts)).unwrap();
    Gguf::from_vec("imatrix.gguf", body.finish().unwrap()).unwrap()
}

#[test]
fn the_newer_format_gives_means_of_each_expert() {
    let file = gguf("imatrix", &[2.0, 4.0, 9.0, 9.0], &[2.0, 0.0]);
    let found = Imatrix::from_gguf(&file).unwrap();
    assert_eq!(found.get("x.weight"), Some(&[1.0, 2.0, 1.0, 1.0][..]));
    assert_eq!(
        (found.chunks, found.dataset.as_deref()),
        (Some(3), Some("wiki"))
    );
    let error = Imatrix::from_gguf(&gguf("model", &[1.0], &[1.0])).unwrap_err();
    assert!(error.to_string().contains("\"imatrix\""), "{error}");
    let error = Imatrix::from_gguf(&gguf("imatrix", &[f32::INFINITY], &[1.0])).unwrap_err();
    assert!(error.to_string().contains("inf"), "{error}");
}

#[test]
fn open_tells_the_formats_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.dat");
    std::fs::write(&path, list(&[entry("a", 2, &[4.0])], &[])).unwrap();
    assert_eq!(Imatrix::open(&path).unwrap().get("a"), Some(&[2.0][..]));
    std::fs::write(&path, list(&[], &[])).unwrap();
    assert!(
        Imatrix::open(&path)
            .unwrap_err()
            .to_string()
            .contains("no importance")
    );
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
    }

    #[test]
    fn damaged_lists_are_read_without_panic(at in 0usize..60, byte: u8) {
        let mut bytes = list(&[entry("ab", 2, &[4.0, 1.0]), entry("c", 1, &[1.0])], &[]);
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = read(&bytes);
    }
}
