//! Configuration files of `ferrum serve`: what a file says, printed as a file, says the same.
#![no_main]
#![allow(
    dead_code,
    unused_imports,
    reason = "a part of the program is compiled"
)]

// The program has no library, so its modules are compiled as they are.
#[path = "../../crates/ferrum-cli/src"]
mod program {
    pub(crate) mod args;
    pub(crate) mod config_file;
    pub(crate) mod failure;
    pub(crate) mod input;
    pub(crate) mod ui;
}

/// Stands in for what the program knows by its build script.
mod version {
    pub(crate) fn long() -> &'static str {
        "fuzz"
    }
}

/// Stands in for the ranks of a model, which no file starts.
mod ranks {
    use crate::args::PlacementArgs;
    use crate::failure::Outcome;
    use ferrum_engine::Placement;
    use ferrum_models::Model;

    pub(crate) fn place(_: &PlacementArgs, _: &Model) -> Outcome<Option<Placement>> {
        Ok(None)
    }
}

use libfuzzer_sys::fuzz_target;
use program::{args, config_file, failure, input, ui};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let printed = match config_file::reprinted(text) {
        Ok(printed) => printed,
        Err(failure) => {
            assert!(!failure.to_string().is_empty());
            return;
        }
    };
    // Keys are not printed, and each stands for one that is.
    let keys = printed
        .contains("# api-key is set")
        .then_some("api-key = \"k\"\n");
    let again = keys.unwrap_or_default().to_owned() + &printed;
    match config_file::reprinted(&again) {
        Ok(found) => assert_eq!(found, printed),
        Err(failure) => panic!("{failure}\n{printed}"),
    }
});
