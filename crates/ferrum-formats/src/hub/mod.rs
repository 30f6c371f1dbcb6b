//! The cache of a Hugging Face hub: where models lie that were downloaded.
//!
//! The layout is that of `huggingface_hub` and its relatives, so that one cache serves them all:
//!
//! ```text
//! ROOT/models--ORG--NAME/refs/main              the commit that a branch or tag meant last
//! ROOT/models--ORG--NAME/blobs/ETAG             contents, named by their hash
//! ROOT/models--ORG--NAME/snapshots/COMMIT/FILE  links to blobs: the files of a commit
//! ROOT/.locks/models--ORG--NAME/ETAG.lock       held while a blob is written
//! ```
//!
//! Only names and files here; what talks to a hub is `ferrum-client`.

mod cache;
mod choose;
mod names;
mod remove;
mod scan;

pub use cache::{BlobLock, CachedRepo, HubCache, SnapshotFile};
pub use choose::{DownloadScope, SelectedFiles, Weights, select_files};
pub use names::{Commit, Etag, ModelName, RepoId, Revision, check_file_name};
pub use remove::Removal;
pub use scan::{CachedModel, CachedSnapshot};
