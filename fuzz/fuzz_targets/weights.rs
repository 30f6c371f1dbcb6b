//! Files of packed weights, with checksums that are right.
#![no_main]

use ferrum_formats::weight_cache::PackedFile;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let _ = PackedFile::from_vec(Path::new("fuzz.weights"), data.to_vec());
    // Checksums keep a fuzzer out of the table.
    let bytes = PackedFile::sealed(&[], data);
    if let Ok(file) = PackedFile::from_vec(Path::new("fuzz.weights"), bytes) {
        for name in file.names() {
            let panels = file.entry(&name).map(|(_, panels)| panels);
            let _ = panels.map(|panels| &file.as_ref()[panels]);
        }
        file.verify(1);
    }
});
