//! safetensors: round trips with the format's own crate, wrong files, shards.

mod common;

use common::safetensors as file;
use ferrum_formats::{FormatError, Safetensors, TensorDtype, TensorSource};
use ferrum_test_support::skip;
use ferrum_types::Dtype;
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::path::Path;

fn open(bytes: Vec<u8>) -> Result<Safetensors, FormatError> {
    Safetensors::from_vec("t.safetensors", bytes)
}

/// A file with these f32 tensors, written by the format's own crate.
fn write(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(i, (_, shape))| vec![i as u8 + 1; 4 * shape.iter().product::<usize>()])
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data);
        (*name, view.expect("the shape fits"))
    });
    let views: BTreeMap<_, _> = views.collect();
    safetensors::serialize(views, None).expect("it can be written")
}

fn read_all(set: &Safetensors) {
    for info in set.infos() {
        let view = set.get(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes.len(), info.byte_len);
    }
}

#[test]
fn what_its_own_crate_writes_is_read() {
    let set = open(write(&[
        ("a", &[2, 3]),
        ("b", &[4]),
        ("empty", &[0, 7]),
        ("one", &[]),
    ]))
    .unwrap();
    let a = set.require("a").unwrap();
    assert_eq!(
        (a.shape, a.dtype),
        (&[2, 3][..], TensorDtype::Plain(Dtype::F32))
    );
    assert_eq!(a.bytes, [1; 24]);
    assert_eq!(set.require("b").unwrap().bytes, [2; 16]);
    assert!(set.require("empty").unwrap().bytes.is_empty());
    assert_eq!(set.require("one").unwrap().elements(), 1);
    assert_eq!(set.total_bytes(), 24 + 16 + 4);
    assert!(set.get("c").is_none());
}

#[test]
fn every_dtype_is_known_with_its_size() {
    // Names and bits of the format's own crate, which spells them as it writes them.
    use safetensors::Dtype as D;
    let all = [
        D::BOOL,
        D::F4,
        D::F6_E2M3,
        D::F6_E3M2,
        D::U8,
        D::I8,
        D::F8_E5M2,
        D::F8_E4M3,
        D::F8_E8M0,
        D::F8_E4M3FNUZ,
        D::F8_E5M2FNUZ,
        D::I16,
        D::U16,
        D::F16,
        D::BF16,
        D::I32,
        D::U32,
        D::F32,
        D::C64,
        D::F64,
        D::I64,
        D::U64,
    ];
    for dtype in all {
        let bytes = vec![0; dtype.bitsize()];
        let view = TensorView::new(dtype, vec![2, 4], &bytes).unwrap();
        let set = open(safetensors::serialize([("t", view)], None).unwrap()).unwrap();
        let info = set.infos().next().unwrap();
        assert_eq!(info.byte_len, bytes.len(), "{dtype}");
        if let TensorDtype::Opaque { name, bits } = info.dtype {
            assert_eq!(
                (name, usize::from(bits)),
                (dtype.to_string().as_str(), dtype.bitsize())
            );
        }
    }
}

/// Wrong files, and words their message must hold.
fn wrong_files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let one = |info: &str, data| file(&format!("{{\"t\":{info}}}"), data);
    let t = |dtype: &str, shape: &str, offsets: &str| {
        format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}")
    };
    let two = |a: &str, b: &str| file(&format!("{{\"a\":{a},\"b\":{b}}}"), 16);
    let full = t("F32", "[4]", "[0,16]");
    let many: String = (0..200).map(|_| '[').collect();
    vec![
        ("empty", vec![], "the header length"),
        ("short", vec![1, 2, 3], "the header length"),
        (
            "64 zero bytes",
            vec![0; 64],
            "found byte 0x00, expected \"{\"",
        ),
        ("64 bytes", vec![0xff; 64], "at most 100000000 bytes"),
        (
            "too long",
            [&90_000u64.to_le_bytes()[..], b"{}"].concat(),
            "90000 bytes needed at offset 8, 2 left",
        ),
        ("no object", file("[1,2]", 0), "start of the header"),
        (
            "a pickle",
            b"PK\x03\x04\0\0\0\0rest".to_vec(),
            "no safetensors file",
        ),
        ("no JSON", file("{\"a\"", 0), "safetensors header"),
        ("deep", one(&many, 0), "tensor \"t\""),
        (
            "UTF-8",
            file("{\"\u{e9}\":1}", 0)
                .into_iter()
                .map(|b| if b == 0xc3 { 0xff } else { b })
                .collect(),
            "header",
        ),
        (
            "no dtype",
            one("{\"shape\":[],\"data_offsets\":[0,0]}", 0),
            "missing field `dtype`",
        ),
        ("dtype", one(&t("F3", "[4]", "[0,16]"), 16), "dtype \"F3\""),
        (
            "negative",
            one(&t("F32", "[-4]", "[0,16]"), 16),
            "tensor \"t\"",
        ),
        (
            "float",
            one(&t("F32", "[4.5]", "[0,16]"), 16),
            "tensor \"t\"",
        ),
        (
            "shape type",
            one(&t("F32", "\"x\"", "[0,16]"), 16),
            "tensor \"t\"",
        ),
        (
            "product",
            one(&t("F32", "[4294967296,4294967296,2]", "[0,16]"), 16),
            "that fits",
        ),
        (
            "hidden product",
            one(&t("F32", "[0,4294967296,4294967296,2]", "[0,0]"), 0),
            "that fits",
        ),
        ("bits", one(&t("F4", "[3]", "[0,1]"), 1), "whole bytes"),
        (
            "backwards",
            one(&t("F32", "[4]", "[16,0]"), 16),
            "data offsets 16 to 0",
        ),
        (
            "past the end",
            one(&t("F32", "[4]", "[16,32]"), 16),
            "inside the file's 16 data bytes",
        ),
        (
            "far past the end",
            one(
                &t("U8", "[18446744073709551615]", "[0,18446744073709551615]"),
                16,
            ),
            "inside the file's 16",
        ),
        (
            "size",
            one(&t("F32", "[3]", "[0,16]"), 16),
            "found 16 bytes, expected 12 bytes",
        ),
        (
            "hole",
            two(&t("F32", "[1]", "[0,4]"), &t("F32", "[2]", "[8,16]")),
            "without holes or overlaps",
        ),
        (
            "overlap",
            two(&full, &t("F32", "[2]", "[8,16]")),
            "without holes or overlaps",
        ),
        ("same place", two(&full, &full), "without holes or overlaps"),
        (
            "late start",
            one(&t("F32", "[2]", "[8,16]"), 16),
            "found data at offset 8, expected offset 0",
        ),
        (
            "rest",
            one(&full, 20),
            "found 20 bytes, expected the 16 bytes of its tensors",
        ),
        (
            "duplicate",
            file(&format!("{{\"t\":{full},\"t\":{full}}}"), 16),
            "\"t\" appears more than once",
        ),
        (
            "two metadata",
            file("{\"__metadata__\":{},\"__metadata__\":{}}", 0),
            "appears more than once",
        ),
        (
            "metadata",
            file("{\"__metadata__\":{\"a\":1}}", 0),
            "expected a string",
        ),
    ]
}

#[test]
fn wrong_files_are_refused_with_reasons() {
    let mut failures = Vec::new();
    for (case, bytes, words) in wrong_files() {
        match open(bytes) {
            Ok(_) => failures.push(format!("{case}: accepted")),
            Err(e) if !e.to_string().contains(words) => failures.push(format!("{case}: {e}")),
            Err(e) => assert!(e.to_string().starts_with("t.safetensors: "), "{e}"),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = write(&[("a", &[2]), ("b", &[3])]);
    for len in 0..whole.len() {
        assert!(open(whole[..len].to_vec()).is_err(), "cut at {len}");
    }
}

#[test]
fn a_hundred_thousand_tensors() {
    let entries: Vec<String> = (0..100_000)
        .map(|i| {
            format!(
                "\"t{i}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{i},{}]}}",
                i + 1
            )
        })
        .collect();
    let set = open(file(&format!("{{{}}}", entries.join(",")), 100_000)).unwrap();
    assert_eq!(set.infos().count(), 100_000);
    assert_eq!(set.require("t99999").unwrap().bytes, [0]);
}

fn shards(
    index: &str,
    files: &[(&str, Vec<u8>)],
) -> (tempfile::TempDir, Result<Safetensors, FormatError>) {
    let dir = tempfile::tempdir().expect("a folder can be made");
    let index = ("model.safetensors.index.json", index.as_bytes());
    for (name, bytes) in files.iter().map(|(n, b)| (*n, b.as_slice())).chain([index]) {
        std::fs::write(dir.path().join(name), bytes).expect("the folder can be written");
    }
    let set = Safetensors::open_folder(dir.path());
    (dir, set)
}

#[test]
fn shards_are_one_set() {
    let index = r#"{"metadata":{"total_size":44},"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"}}"#;
    let first = write(&[("a", &[2])]);
    let second = write(&[("b", &[4]), ("c", &[5])]);
    let (_dir, set) = shards(
        index,
        &[("1.safetensors", first), ("2.safetensors", second)],
    );
    let set = set.unwrap();
    assert_eq!(set.file_count(), 2);
    assert_eq!(set.require("c").unwrap().shape, [5]);
    assert_eq!(set.total_bytes(), 44);
    read_all(&set);
}

#[test]
fn wrong_indices_are_refused_with_reasons() {
    let map = |map: &str| format!("{{\"weight_map\":{map}}}");
    let cases = [
        (
            "up",
            map(r#"{"a":"../1.safetensors"}"#),
            "inside the folder",
        ),
        (
            "up below",
            map(r#"{"a":"x/../../1.safetensors"}"#),
            "inside the folder",
        ),
        ("root", map(r#"{"a":"/etc/passwd"}"#), "inside the folder"),
        (
            "backslash",
            map(r#"{"a":"..\\1.safetensors"}"#),
            "inside the folder",
        ),
        ("no name", map(r#"{"a":""}"#), "inside the folder"),
        (
            "missing shard",
            map(r#"{"a":"9.safetensors"}"#),
            "names shard \"9.safetensors\", which is not there",
        ),
        (
            "missing tensor",
            map(r#"{"b":"1.safetensors"}"#),
            "tensor \"b\" is missing",
        ),
        (
            "wrong shard",
            map(r#"{"a":"2.safetensors","z":"1.safetensors"}"#),
            "appears more than once",
        ),
        (
            "other shard",
            map(r#"{"a":"3.safetensors","z":"1.safetensors"}"#),
            "tensor \"a\" is missing",
        ),
        ("no map", "{}".into(), "field \"weight_map\" is missing"),
        ("list", map("[]"), "found list [], expected an object"),
        (
            "number",
            map(r#"{"a":1}"#),
            "field \"weight_map.a\": found number 1, expected the name of a file",
        ),
        ("no JSON", "{".into(), "model.safetensors.index.json: EOF"),
    ];
    let files = [
        ("1.safetensors", write(&[("a", &[2]), ("z", &[1])])),
        ("2.safetensors", write(&[("a", &[2])])),
        ("3.safetensors", write(&[("y", &[1])])),
    ];
    for (case, index, words) in cases {
        let (_dir, set) = shards(&index, &files);
        let e = set
            .err()
            .unwrap_or_else(|| panic!("{case}: accepted"))
            .to_string();
        assert!(e.contains(words), "{case}: {e}");
    }
}

#[test]
fn fixture_models_are_read() {
    let dir = common::workspace_root().join("fixtures/models");
    let files = common::files(&dir, "safetensors");
    if files.is_empty() {
        return skip("no .safetensors below fixtures/models");
    }
    for path in files {
        let set = Safetensors::open(&path).unwrap_or_else(|e| panic!("{e}"));
        assert!(set.infos().count() > 0, "{}", path.display());
        read_all(&set);
    }
}

#[test]
fn a_missing_file_is_named() {
    let e = Safetensors::open(Path::new("no/such.safetensors")).unwrap_err();
    assert!(
        e.to_string()
            .starts_with("no/such.safetensors: could not open: "),
        "{e}"
    );
}

proptest! {
    #[test]
    fn random_bytes_never_panic(header in ".{0,200}", data in 0usize..64, json in any::<bool>()) {
        let header = if json { format!("{{{header}") } else { header };
        if let Ok(set) = open(file(&header, data)) {
            read_all(&set);
        }
    }

    #[test]
    fn mutations_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = write(&[("a", &[2, 3]), ("b", &[4]), ("c", &[])]);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(set) = open(bytes) {
            read_all(&set);
        }
    }

    #[test]
    fn any_offsets_never_panic(a in any::<(u64, u64)>(), b in 0u64..20, dims in prop::collection::vec(any::<u64>(), 0..4)) {
        let t = format!("{{\"t\":{{\"dtype\":\"U8\",\"shape\":{dims:?},\"data_offsets\":[{},{}]}},\"u\":{{\"dtype\":\"U8\",\"shape\":[{b}],\"data_offsets\":[0,{b}]}}}}", a.0, a.1);
        if let Ok(set) = open(file(&t, 16)) {
            read_all(&set);
        }
    }
}
