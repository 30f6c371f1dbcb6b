//! GGUF: whatever opens must be readable to the last tensor, and writable again.
#![no_main]

use ferrum_formats::TensorSource;
use ferrum_formats::gguf::{Gguf, Value, Writer};
use libfuzzer_sys::fuzz_target;

fn walk(value: Value<'_>) -> usize {
    match value {
        Value::Array(array) => {
            let seen = array.iter().map(walk).count();
            assert_eq!(seen, array.len(), "an array ends early");
            seen
        }
        other => other.to_string().len(),
    }
}

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::from_vec("fuzz.gguf", data.to_vec()) else {
        return;
    };
    let mut copy = Writer::new("copy.gguf");
    for (key, value) in gguf.metadata() {
        walk(value);
        assert_eq!(
            gguf.value(key).map(|v| v.value_type()),
            Some(value.value_type())
        );
        let _ = (gguf.u32(key), gguf.f32(key), gguf.bool(key), gguf.str(key));
        let _ = (
            gguf.u64s(key),
            gguf.f32s(key),
            gguf.bools(key),
            gguf.strs(key),
        );
        let _ = (gguf.u32_per_layer(key), gguf.bool_per_layer(key));
        copy.set(key, value).expect("what was read can be written");
    }
    for info in gguf.infos() {
        let view = gguf.get(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes.len(), info.byte_len);
        assert_eq!(info.dtype.bytes_for(info.elements()), Some(info.byte_len));
    }
    let copy = copy
        .start(Vec::new())
        .and_then(|body| body.finish())
        .expect("written");
    let copy = Gguf::from_vec("copy.gguf", copy).expect("what was written can be read");
    assert_eq!(copy.metadata().count(), gguf.metadata().count());
});
