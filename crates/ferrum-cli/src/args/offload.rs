//! Arguments about KV blocks that the device has no room for.

use clap::Args;
use std::path::PathBuf;
use std::str::FromStr;

/// Bytes, as people write them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, u32); 5] =
            [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];
        let trimmed = text.trim();
        let unit = UNITS.iter().find_map(|&(name, bits)| {
            let number = trimmed.strip_suffix(name)?;
            Some((number.trim_end(), bits))
        });
        let (number, bits) = unit.unwrap_or((trimmed, 0));
        let bytes = number.parse::<u64>().ok();
        let bytes = bytes.and_then(|n| n.checked_mul(1 << bits));
        let wrong = || format!("found \"{text}\", expected a size such as 4GiB or 512MiB");
        bytes.map(Self).ok_or_else(wrong)
    }
}

/// Where KV blocks go that the prefix cache has no room for.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct OffloadArgs {
    /// Most memory for what the prefix cache has no room for on the device, such as 4GiB [default: none]
    #[arg(long, value_name = "SIZE")]
    pub(crate) kv_offload_ram: Option<Size>,

    /// Folder for what that memory has no room for; the next start goes on from it. It holds what can be turned back
    /// into prompts [default: none]
    #[arg(long, value_name = "DIR")]
    pub(crate) kv_offload_dir: Option<PathBuf>,

    /// Most bytes in that folder, such as 100GiB; what was used least recently goes first [default: a fifth of the
    /// disk's free space, at most 32GiB]
    #[arg(long, value_name = "SIZE", requires = "kv_offload_dir")]
    pub(crate) kv_offload_dir_limit: Option<Size>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512 B", 512),
            ("4GiB", 4 << 30),
            (" 3 MiB ", 3 << 20),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "4GB", "-1", "1.5GiB", "99999999999TiB"] {
            let error = text.parse::<Size>().expect_err("no size");
            assert!(error.contains("such as 4GiB"), "{error}");
        }
    }
}
