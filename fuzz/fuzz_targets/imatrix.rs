//! Importance matrices in both formats.
#![no_main]

use ferrum_formats::Imatrix;
use ferrum_formats::gguf::Gguf;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let _ = Imatrix::from_list(Path::new("fuzz.dat"), data);
    if let Ok(gguf) = Gguf::from_vec("fuzz.gguf", data.to_vec()) {
        let _ = Imatrix::from_gguf(&gguf);
    }
});
