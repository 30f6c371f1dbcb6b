//! The demo model, which is part of the program.

use ferrum_formats::{FormatError, Gguf};

/// A small chat model that answers without any download.
pub(crate) static DEMO: &[u8] = include_bytes!("../../../assets/demo/ferrum-demo.gguf");

/// The demo model.
pub(crate) fn demo() -> Result<Gguf, FormatError> {
    Gguf::from_static(DEMO)
}
