//! safetensors: whatever opens must be readable to the last tensor.
#![no_main]

use ferrum_formats::{Safetensors, TensorSource};
use libfuzzer_sys::fuzz_target;

fn check(bytes: Vec<u8>) {
    let Ok(set) = Safetensors::from_vec("fuzz.safetensors", bytes) else {
        return;
    };
    for info in set.infos() {
        let view = set.get(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes.len(), info.byte_len);
        assert_eq!(info.dtype.bytes_for(info.elements()), Some(info.byte_len));
    }
}

fuzz_target!(|data: &[u8]| {
    check(data.to_vec());
    // A fuzzer seldom guesses the header's length, so it also gets the right one: JSON up to the
    // last brace, the rest data.
    let json = data.iter().rposition(|&b| b == b'}').map_or(0, |at| at + 1);
    check([&(json as u64).to_le_bytes()[..], data].concat());
});
