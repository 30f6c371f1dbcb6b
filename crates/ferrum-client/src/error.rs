//! What can go wrong between here and a server.

use ferrum_formats::{FormatError, Shown};
use std::io;
use std::path::Path;

/// Result with [`ClientError`].
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Everything that a request or a download can fail with.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// A text is no address that can be asked.
    #[error("\"{}\" is no usable address: {reason}", Shown(.url))]
    Url {
        /// The text.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The server cannot be reached, or went away.
    #[error("{url}: {reason}")]
    Unreachable {
        /// What was asked.
        url: String,
        /// The system's or the protocol's words.
        reason: String,
    },
    /// The server is not to be reached: its addresses are those of this machine or a private network.
    #[error("{url}: the host has no public address")]
    NotPublic {
        /// What was asked.
        url: String,
    },
    /// The server did not go on in time.
    #[error("{url}: nothing came for {seconds} s while {what}")]
    Timeout {
        /// What was asked.
        url: String,
        /// What was waited for.
        what: &'static str,
        /// For how long.
        seconds: u64,
    },
    /// The server answers with something that the protocol does not have.
    #[error("{url}: {reason}")]
    Protocol {
        /// What was asked.
        url: String,
        /// What was found and expected.
        reason: String,
    },
    /// The server refuses; the message says what that means for the caller.
    #[error("{message}{}", hint_line(.hint))]
    Refused {
        /// The status code.
        status: u16,
        /// Seconds after which the server wants to be asked again, where it says so.
        retry_after: Option<u64>,
        /// A sentence.
        message: String,
        /// Next step; empty when there is none.
        hint: String,
    },
    /// A file is not what its name or size promised.
    #[error(
        "{file}: {what}: found {found}, expected {expected}\nhint: ask again; if it stays so, the server's copy is damaged"
    )]
    Damaged {
        /// File of the repository.
        file: String,
        /// What does not agree.
        what: &'static str,
        /// What was received.
        found: String,
        /// What was promised.
        expected: String,
    },
    /// The disk cannot take a download.
    #[error("{}: {reason}{}", .path.display(), hint_line(.hint))]
    Disk {
        /// File.
        path: Box<Path>,
        /// The system's own words.
        reason: String,
        /// Next step; empty when there is none.
        hint: &'static str,
    },
    /// Names, cache and choice of files.
    #[error(transparent)]
    Format(#[from] FormatError),
}

fn hint_line(hint: &str) -> String {
    match hint {
        "" => String::new(),
        hint => format!("\nhint: {hint}"),
    }
}

impl ClientError {
    /// An error of a disk, with what to do when it is full.
    pub fn disk(path: &Path, e: &io::Error) -> Self {
        let full = matches!(
            e.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let hint = match full {
            true => "make room, or name another folder with --cache-dir; what has come is kept",
            false => "",
        };
        ClientError::Disk {
            path: path.into(),
            reason: format!("could not be written: {e}"),
            hint,
        }
    }

    /// Whether asking again may help.
    pub fn is_transient(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } | ClientError::Timeout { .. } => true,
            ClientError::Refused { status, .. } => {
                matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_what_to_do() {
        let path = Path::new("/cache/blobs/x.incomplete");
        let full = ClientError::disk(path, &io::ErrorKind::StorageFull.into());
        assert!(full.to_string().contains("hint: make room"), "{full}");
        let other = ClientError::disk(path, &io::ErrorKind::PermissionDenied.into());
        assert!(!other.to_string().contains("hint"), "{other}");
        assert!(!full.is_transient());
    }
}
