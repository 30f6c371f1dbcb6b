//! GGUF: round trips, files that are wrong by hand and by chance, and real ones.

mod common;

use common::{Raw, small_gguf, string};
use ferrum_formats::gguf::{ArrayBuf, Gguf, PerLayer, Value, ValueType, Writer};
use ferrum_formats::{FormatError, TensorDtype, TensorSource};
use ferrum_test_support::skip;
use ferrum_types::{Dtype, GgufQuantType};
use proptest::prelude::*;

fn open(bytes: Vec<u8>) -> Result<Gguf, FormatError> {
    Gguf::from_vec("t.gguf", bytes)
}

/// Touches everything a file offers; must not panic whatever the file holds.
fn read_all(gguf: &Gguf) {
    fn walk(value: Value<'_>) -> usize {
        match value {
            Value::Array(array) => array.iter().map(walk).sum(),
            other => other.to_string().len(),
        }
    }
    for (key, value) in gguf.metadata() {
        walk(value);
        let _ = (gguf.u32(key), gguf.f32(key), gguf.bool(key), gguf.str(key));
        let _ = (
            gguf.u32s(key),
            gguf.f32s(key),
            gguf.bools(key),
            gguf.strs(key),
        );
        let _ = gguf.u32_per_layer(key);
    }
    for info in gguf.infos() {
        let view = gguf.get(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes.len(), info.byte_len);
    }
}

#[test]
fn what_is_written_is_read() {
    let gguf = open(small_gguf()).unwrap();
    assert_eq!((gguf.version(), gguf.alignment()), (3, 64));
    assert_eq!(gguf.architecture().unwrap(), "llama");
    assert_eq!(gguf.usize("llama.block_count").unwrap(), Some(2));
    assert_eq!(gguf.require_f32("a.f").unwrap(), 0.5);
    assert_eq!(gguf.require_f32("a.d").unwrap(), 0.25);
    assert!(gguf.require_bool("a.b").unwrap());
    assert_eq!(gguf.require_i32("a.i").unwrap(), -3);
    assert_eq!(gguf.require_strs("tokens").unwrap(), ["<s>", "é", ""]);
    assert_eq!(gguf.require_i32s("types").unwrap(), [1, -2, 3]);
    assert_eq!(gguf.require_bools("flags").unwrap(), [true, false]);
    assert_eq!(gguf.u32("absent").unwrap(), None);
    let Some(Value::Array(nested)) = gguf.value("nested") else {
        panic!("nested is an array");
    };
    assert_eq!(nested.elem_type(), ValueType::Array);
    assert_eq!(nested.iter().count(), 2);

    let a = gguf.require("a.weight").unwrap();
    assert_eq!(
        (a.shape, a.dtype),
        (&[2, 3][..], TensorDtype::Plain(Dtype::F32))
    );
    assert_eq!(a.bytes, (0u8..24).collect::<Vec<_>>());
    let b = gguf.require("b.weight").unwrap();
    assert_eq!(
        (b.shape, b.dtype),
        (&[2, 32][..], TensorDtype::Quant(GgufQuantType::Q8_0))
    );
    assert_eq!(b.bytes, [[1u8; 34], [2; 34]].concat());
    let scalar = gguf.require("scalar").unwrap();
    assert_eq!((scalar.shape.len(), scalar.bytes), (0, &[9u8, 9][..]));
    let names: Vec<_> = gguf.infos().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["a.weight", "b.weight", "scalar"]);
    assert_eq!(gguf.total_bytes(), 24 + 68 + 2);
    assert!(gguf.get("c.weight").is_none());
}

#[test]
fn copying_metadata_through_the_writer_changes_nothing() {
    let gguf = open(small_gguf()).unwrap();
    let mut w = Writer::new("copy.gguf");
    for (key, value) in gguf.metadata() {
        w.set(key, value).unwrap();
    }
    let copy = open(w.start(Vec::new()).unwrap().finish().unwrap()).unwrap();
    assert!(gguf.metadata().eq(copy.metadata()));
}

#[test]
fn every_tensor_type_is_recognised() {
    for kind in GgufQuantType::all() {
        let mut w = Writer::new("t.gguf");
        w.declare("t", &[3, kind.block_len() * 2], kind).unwrap();
        let mut body = w.start(Vec::new()).unwrap();
        body.push("t", &vec![0; kind.block_bytes() * 6]).unwrap();
        let gguf = open(body.finish().unwrap()).unwrap();
        let info = gguf.infos().next().unwrap();
        assert_eq!(info.byte_len, kind.block_bytes() * 6, "{kind}");
        assert_eq!(info.dtype, TensorDtype::from(kind));
        assert_eq!(info.dtype.name().to_lowercase(), kind.name().to_lowercase());
        assert_eq!(info.dtype.quant().is_some(), kind.is_quantized(), "{kind}");
    }
}

#[test]
fn a_value_may_be_given_once_or_per_layer() {
    let raw = Raw::default().pair("one", 4, &8u32.to_le_bytes()).pair(
        "each",
        9,
        &[
            &5u32.to_le_bytes()[..],
            &2u64.to_le_bytes(),
            &[4, 0, 0, 0, 2, 0, 0, 0],
        ]
        .concat(),
    );
    let gguf = open(raw.bytes()).unwrap();
    assert_eq!(gguf.u32_per_layer("one").unwrap(), Some(PerLayer::All(8)));
    let each = gguf.u32_per_layer("each").unwrap().unwrap();
    assert_eq!(
        (each.get(0), each.get(1), each.get(2)),
        (Some(4), Some(2), None)
    );
    assert_eq!(gguf.u32_per_layer("none").unwrap(), None);
}

/// Wrong files, and words their message must hold.
fn wrong_files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let f32_id = 0;
    let raw = Raw::default;
    let one = || raw().tensor("t", &[4], f32_id, 0).data(32);
    let array = |elem: u32, len: u64| [&elem.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let deep: Vec<u8> = (0..9)
        .flat_map(|_| array(9, 1))
        .chain(array(0, 0))
        .collect();
    let with = |change: &dyn Fn(&mut Raw)| {
        let mut raw = one();
        change(&mut raw);
        raw.bytes()
    };
    vec![
        ("empty", vec![], "ends within the GGUF magic"),
        ("64 zero bytes", vec![0; 64], "no GGUF file"),
        (
            "64 bytes",
            [b"GGUF\x03\0\0\0".to_vec(), vec![0xff; 56]].concat(),
            "tensor table",
        ),
        (
            "magic",
            with(&|r| r.magic = Some(*b"GGML")),
            "found \"GGML\", expected \"GGUF\"",
        ),
        (
            "version 1",
            with(&|r| r.version = Some(1)),
            "convert the model again",
        ),
        (
            "version 4",
            with(&|r| r.version = Some(4)),
            "found 4, expected 2 or 3",
        ),
        (
            "big-endian",
            with(&|r| r.version = Some(3u32.swap_bytes())),
            "big-endian GGUF version 3",
        ),
        (
            "too many pairs",
            with(&|r| r.pair_count = Some(1 << 40)),
            "entries of the metadata",
        ),
        (
            "all pairs",
            with(&|r| r.pair_count = Some(u64::MAX)),
            "entries of the metadata",
        ),
        (
            "too many tensors",
            with(&|r| r.tensor_count = Some(1 << 20)),
            "entries of the tensor table",
        ),
        (
            "long key",
            raw()
                .pair("k", 0, &[1])
                .bytes()
                .into_iter()
                .enumerate()
                .map(|(i, b)| if i == 30 { 0xff } else { b })
                .collect(),
            "ends within a metadata key",
        ),
        (
            "value type",
            raw().pair("k", 13, &[0; 8]).bytes(),
            "value type 13",
        ),
        (
            "element type",
            raw().pair("k", 9, &array(99, 0)).bytes(),
            "value type 99",
        ),
        (
            "empty key",
            raw().pair("", 4, &[0; 4]).bytes(),
            "metadata key: found empty text",
        ),
        (
            "long string",
            raw().pair("k", 8, &u64::MAX.to_le_bytes()).bytes(),
            "key \"k\"",
        ),
        (
            "text",
            raw().pair("k", 8, &string(b"\xff\xfe")).bytes(),
            "UTF-8",
        ),
        (
            "text in array",
            raw()
                .pair("k", 9, &[array(8, 1), string(b"\xff")].concat())
                .bytes(),
            "UTF-8",
        ),
        ("bool", raw().pair("k", 7, &[2]).bytes(), "bool byte 2"),
        (
            "bools",
            raw()
                .pair("k", 9, &[array(7, 2), vec![1, 9]].concat())
                .bytes(),
            "bool byte 9",
        ),
        (
            "long array",
            raw().pair("k", 9, &array(12, 1 << 61)).bytes(),
            "entries of metadata key",
        ),
        (
            "deep arrays",
            raw().pair("k", 9, &deep).bytes(),
            "array depth",
        ),
        (
            "duplicate key",
            raw().pair("k", 0, &[1]).pair("k", 0, &[1]).bytes(),
            "metadata key \"k\" appears more than once",
        ),
        (
            "duplicate tensor",
            one().tensor("t", &[4], f32_id, 32).data(64).bytes(),
            "tensor \"t\" appears more than once",
        ),
        (
            "dimensions",
            raw().tensor("t", &[1; 9], f32_id, 0).data(32).bytes(),
            "9 dimensions",
        ),
        (
            "all dimensions",
            raw()
                .tensor("t", &[], f32_id, 0)
                .data(32)
                .bytes()
                .into_iter()
                .enumerate()
                .map(|(i, b)| if (33..37).contains(&i) { 0xff } else { b })
                .collect(),
            "4294967295 dimensions",
        ),
        (
            "zero dimension",
            raw().tensor("t", &[4, 0], f32_id, 0).data(32).bytes(),
            "dimension 0",
        ),
        (
            "product",
            raw()
                .tensor("t", &[1 << 32, 1 << 32, 1 << 32], f32_id, 0)
                .data(32)
                .bytes(),
            "fits in memory",
        ),
        (
            "product in bytes",
            raw().tensor("t", &[1 << 62, 2], f32_id, 0).data(32).bytes(),
            "fits in memory",
        ),
        (
            "rows",
            raw().tensor("t", &[33, 32], 8, 0).data(2048).bytes(),
            "multiple of 32",
        ),
        (
            "removed type",
            raw().tensor("t", &[32], 4, 0).data(32).bytes(),
            "Q4_2",
        ),
        (
            "unknown type",
            raw().tensor("t", &[32], 77, 0).data(32).bytes(),
            "unknown ggml type 77",
        ),
        (
            "alignment 0",
            raw().pair("general.alignment", 4, &[0; 4]).bytes(),
            "power of two",
        ),
        (
            "alignment 24",
            raw()
                .pair("general.alignment", 4, &24u32.to_le_bytes())
                .bytes(),
            "power of two",
        ),
        (
            "alignment text",
            raw().pair("general.alignment", 8, &string(b"x")).bytes(),
            "power of two",
        ),
        (
            "misaligned",
            raw().tensor("t", &[4], f32_id, 4).data(64).bytes(),
            "multiple of the alignment 32",
        ),
        (
            "past the end",
            raw().tensor("t", &[4], f32_id, 32).data(32).bytes(),
            "inside its 32 bytes",
        ),
        (
            "far past the end",
            raw()
                .tensor("t", &[4], f32_id, u64::MAX - 31)
                .data(32)
                .bytes(),
            "inside its 32 bytes",
        ),
        (
            "too large",
            raw().tensor("t", &[9], f32_id, 0).data(32).bytes(),
            "36 bytes at offset 0",
        ),
        (
            "overlap",
            raw()
                .tensor("a", &[16], f32_id, 0)
                .tensor("b", &[4], f32_id, 32)
                .data(64)
                .bytes(),
            "shared with tensor \"a\"",
        ),
        (
            "same place",
            raw()
                .tensor("a", &[4], f32_id, 0)
                .tensor("b", &[4], f32_id, 0)
                .data(64)
                .bytes(),
            "shared with tensor",
        ),
        (
            "name",
            with(&|r| *r = raw().tensor("", &[4], f32_id, 0).data(32)),
            "tensor name",
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
            Err(e) => assert!(e.to_string().starts_with("t.gguf: "), "{e}"),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = small_gguf();
    let gguf = open(whole.clone()).unwrap();
    // Behind the last tensor there is only padding.
    let last = gguf.get("scalar").unwrap().bytes;
    let end = last.as_ptr() as usize - gguf.get("a.weight").unwrap().bytes.as_ptr() as usize + 2;
    let data = whole.len().next_multiple_of(64) - 64 * 4;
    assert_eq!(end, 64 * 3 + 2);
    for len in 0..data + end {
        assert!(open(whole[..len].to_vec()).is_err(), "cut at {len}");
    }
    open(whole[..data + end].to_vec()).unwrap();
}

#[test]
fn wrong_element_types_are_named() {
    let raw = Raw::default()
        .pair("neg", 5, &(-1i32).to_le_bytes())
        .pair("big", 10, &(1u64 << 40).to_le_bytes())
        .pair("text", 8, &string(b"hi"))
        .pair(
            "list",
            9,
            &[&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &string(b"x")].concat(),
        );
    let gguf = open(raw.bytes()).unwrap();
    let cases = [
        (
            gguf.u32("neg").unwrap_err(),
            "field \"neg\": found i32 -1, expected an integer from 0 to 4294967295",
        ),
        (
            gguf.u32("big").unwrap_err(),
            "field \"big\": found u64 1099511627776, expected an integer from 0",
        ),
        (
            gguf.f32("text").unwrap_err(),
            "field \"text\": found string \"hi\", expected a float",
        ),
        (
            gguf.u32s("list").unwrap_err(),
            "found string \"x\" at index 0, expected an integer",
        ),
        (
            gguf.strs("text").unwrap_err(),
            "found string \"hi\", expected an array",
        ),
        (
            gguf.bool("list").unwrap_err(),
            "found array of 1 string, expected a bool",
        ),
        (
            gguf.require_str("none").unwrap_err(),
            "field \"none\" is missing, expected a string",
        ),
        (
            gguf.require_u32s("none").unwrap_err(),
            "field \"none\" is missing, expected an array",
        ),
        (
            gguf.require("none").unwrap_err(),
            "tensor \"none\" is missing",
        ),
    ];
    for (error, words) in cases {
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(gguf.u64("big").unwrap(), Some(1 << 40));
}

#[test]
fn a_hundred_thousand_entries_of_each_kind() {
    let mut w = Writer::new("t.gguf");
    let tokens: Vec<String> = (0..100_000).map(|i| format!("token {i}")).collect();
    w.set(
        "tokens",
        &ArrayBuf::from_strs(tokens.iter().map(String::as_str)),
    )
    .unwrap();
    for i in 0..100_000u32 {
        w.set(&format!("key.{i}"), i).unwrap();
        w.declare(&format!("tensor.{i}"), &[1], GgufQuantType::I8)
            .unwrap();
    }
    let mut body = w.start(Vec::new()).unwrap();
    for i in 0..100_000u32 {
        body.push(&format!("tensor.{i}"), &[i as u8]).unwrap();
    }
    let gguf = open(body.finish().unwrap()).unwrap();
    assert_eq!(gguf.require_strs("tokens").unwrap(), tokens);
    assert_eq!(gguf.u32("key.99999").unwrap(), Some(99_999));
    assert_eq!(gguf.get("tensor.777").unwrap().bytes, [777u32 as u8]);
    assert_eq!(gguf.infos().count(), 100_000);
}

#[test]
fn the_writer_refuses_what_a_reader_would() {
    let mut w = Writer::new("w.gguf");
    w.set("k", 1u8).unwrap();
    w.declare("t", &[2], GgufQuantType::F32).unwrap();
    let errors = [
        w.set("k", 2u8).unwrap_err(),
        w.set("", 2u8).unwrap_err(),
        w.set("general.alignment", 64u32).unwrap_err(),
        w.declare("t", &[2], GgufQuantType::F32).unwrap_err(),
        w.declare("", &[2], GgufQuantType::F32).unwrap_err(),
        w.declare("u", &[0], GgufQuantType::F32).unwrap_err(),
        w.declare("u", &[1; 5], GgufQuantType::F32).unwrap_err(),
        w.declare("u", &[usize::MAX, 2], GgufQuantType::F32)
            .unwrap_err(),
        w.declare("u", &[33], GgufQuantType::Q8_0).unwrap_err(),
    ];
    assert!(
        errors.iter().all(|e| e.to_string().starts_with("w.gguf: ")),
        "{errors:?}"
    );
    let mut body = w.start(Vec::new()).unwrap();
    assert!(body.push("u", &[0]).is_err());
    assert!(body.push("t", &[0; 9]).is_err());
    body.push("t", &[0; 7]).unwrap();
    let e = body.finish().unwrap_err().to_string();
    assert!(e.contains("1 bytes missing"), "{e}");
}

#[test]
fn real_vocabularies_are_read() {
    let Some(dir) = common::shared("tokenizers") else {
        return skip("no shared/tokenizers beside the repository");
    };
    for path in common::files(&dir, "gguf") {
        let gguf = Gguf::open(&path).unwrap();
        let tokens = gguf.require_strs("tokenizer.ggml.tokens").unwrap();
        assert!(tokens.len() > 20_000, "{}", path.display());
        let types = gguf.require_i32s("tokenizer.ggml.token_type").unwrap();
        assert_eq!(types.len(), tokens.len());
        assert!(!gguf.require_str("tokenizer.ggml.model").unwrap().is_empty());
        read_all(&gguf);
        println!("{}: {} tokens", path.display(), tokens.len());
    }
}

#[test]
fn fixture_models_are_read() {
    let dir = common::workspace_root().join("fixtures/models");
    let files = common::files(&dir, "gguf");
    if files.is_empty() {
        return skip("no .gguf below fixtures/models");
    }
    for path in files {
        let gguf = Gguf::open(&path).unwrap_or_else(|e| panic!("{e}"));
        gguf.architecture().unwrap();
        assert!(gguf.infos().count() > 0, "{}", path.display());
        read_all(&gguf);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), head in any::<bool>()) {
        if head && bytes.len() >= 24 {
            bytes[..8].copy_from_slice(b"GGUF\x03\0\0\0");
            bytes[9..16].fill(0);
            bytes[17..24].fill(0);
        }
        if let Ok(gguf) = open(bytes) {
            read_all(&gguf);
        }
    }

    #[test]
    fn mutations_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = small_gguf();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(gguf) = open(bytes) {
            read_all(&gguf);
        }
    }

    #[test]
    fn any_metadata_comes_back(
        strings in prop::collection::btree_map("[a-z.]{1,12}", ".{0,20}", 0..8),
        numbers in prop::collection::btree_map("[A-Z]{1,12}", any::<i64>(), 0..8),
        lists in prop::collection::btree_map("[0-9]{1,12}", prop::collection::vec(any::<f64>(), 0..9), 0..4),
    ) {
        let mut w = Writer::new("t.gguf");
        for (key, text) in &strings {
            w.set(key, text.as_str()).unwrap();
        }
        for (key, n) in &numbers {
            w.set(key, *n).unwrap();
        }
        for (key, list) in &lists {
            w.set(key, &ArrayBuf::from_numbers(list.iter().copied())).unwrap();
        }
        let gguf = open(w.start(Vec::new()).unwrap().finish().unwrap()).unwrap();
        prop_assert_eq!(gguf.metadata().count(), strings.len() + numbers.len() + lists.len());
        for (key, text) in &strings {
            prop_assert_eq!(gguf.require_str(key).unwrap(), text);
        }
        for (key, n) in &numbers {
            prop_assert_eq!(gguf.value(key), Some(Value::I64(*n)));
        }
        for (key, list) in &lists {
            let read = gguf.require_f32s(key).unwrap();
            prop_assert!(read.iter().zip(list).all(|(a, b)| a.to_bits() == (*b as f32).to_bits() || b.is_nan()));
        }
    }
}
