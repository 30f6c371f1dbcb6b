//! Verifies file contents against the hash in their ETag.

use ferrum_formats::hub::Etag;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// Hashes a file's contents with the algorithm of its ETag.
pub(super) struct Digest {
    context: Option<Context>,
}

impl Digest {
    /// For contents of `size` bytes: ETags of large files are their SHA-256, those of small ones git's hash of a blob. Other
    /// ETags, as mirrors may have, cannot be verified.
    pub(super) fn new(etag: &Etag, size: Option<u64>) -> Self {
        let context = if etag.is_sha256() {
            Some(Context::new(&SHA256))
        } else if let (true, Some(size)) = (etag.is_git_sha1(), size) {
            let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            context.update(format!("blob {size}\0").as_bytes());
            Some(context)
        } else {
            None
        };
        Self { context }
    }

    /// Whether contents can be verified.
    pub(super) fn is_verifiable(&self) -> bool {
        self.context.is_some()
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        if let Some(context) = &mut self.context {
            context.update(bytes);
        }
    }

    /// The hash in hexadecimal digits, where there is one.
    pub(super) fn finish(self) -> Option<String> {
        let digest = self.context?.finish();
        Some(
            digest
                .as_ref()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_git_and_of_large_files() {
        // `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
        for name in [
            "ce013625030ba8dba906f756967f9e9ca394464a",
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        ] {
            let mut digest = Digest::new(&Etag::parse(name).unwrap(), Some(6));
            digest.update(b"hel");
            digest.update(b"lo\n");
            assert_eq!(digest.finish().unwrap(), name);
        }
        assert!(!Digest::new(&Etag::parse("weak-1").unwrap(), Some(6)).is_verifiable());
    }
}
