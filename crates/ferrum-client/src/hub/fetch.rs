//! One file: its name, its bytes, its place in the cache.

use super::digest::Digest;
use super::retry::Attempts;
use super::{Hub, PullEvent};
use crate::http::{Method, Request, Response, encode_path, header, send_with_redirects};
use crate::{ClientError, Result};
use ferrum_formats::hub::{BlobLock, CachedRepo, Commit, Etag, ModelName, Revision};
use ferrum_formats::{FormatError, Shown};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

/// Most bytes of a file beside the weights.
const MAX_METADATA: u64 = 512 << 20;

/// Most bytes of a file of weights; the largest there are have some tens of gigabytes.
const MAX_WEIGHTS: u64 = 4 << 40;

/// How often a lock is tried that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// Bytes that are read at once of what an earlier download has left.
const READ: usize = 1 << 20;

/// Files of one commit.
pub(super) struct Fetch<'f, 'w> {
    pub(super) hub: &'f Hub,
    pub(super) repo: &'f CachedRepo,
    pub(super) commit: &'f Commit,
    pub(super) watch: &'f mut (dyn FnMut(PullEvent<'_>) + 'w),
    pub(super) fetched: usize,
}

/// The ETag and size of a file, by its headers.
struct Head {
    etag: Etag,
    size: Option<u64>,
}

impl Fetch<'_, '_> {
    /// Fetches a config, index or tokenizer file.
    pub(super) async fn fetch_metadata(&mut self, file: &str) -> Result<()> {
        self.file(file, MAX_METADATA).await
    }

    /// Fetches a file of weights.
    pub(super) async fn fetch_weights(&mut self, file: &str) -> Result<()> {
        self.file(file, MAX_WEIGHTS).await
    }

    async fn file(&mut self, file: &str, limit: u64) -> Result<()> {
        if self.repo.has(self.commit, file)? {
            return Ok(());
        }
        let head = self.head(file).await?;
        if let Some(size) = head.size.filter(|&size| size > limit) {
            let (repo, file) = (self.repo.id(), Shown(file));
            let path = format!("{repo}:{file}");
            return Err(FormatError::limit(Path::new(&path), "size in bytes", size, limit).into());
        }
        let lock = self.lock(file, &head.etag).await?;
        if !lock.blob.is_file() {
            self.blob(file, &head, &lock, limit).await?;
            lock.finish()?;
            self.fetched += 1;
        }
        // Under the lock: until there is a link, nothing says that the blob is used.
        Ok(self.repo.link(self.commit, file, &head.etag)?)
    }

    fn request(&self, method: Method, file: &str) -> Result<Request> {
        let path = format!(
            "/{}/resolve/{}/{}",
            self.repo.id(),
            self.commit,
            encode_path(file)
        );
        self.hub.request(method, &path)
    }

    fn refused(&self, response: &Response, file: &str) -> ClientError {
        let model = ModelName {
            repo: self.repo.id().clone(),
            file: None,
        };
        let revision = Revision::from(self.commit.clone());
        self.hub.refused(response, &model, &revision, Some(file))
    }

    /// Asks for the name and the size of a file.
    async fn head(&self, file: &str) -> Result<Head> {
        let request = self.request(Method::HEAD, file)?;
        let mut attempts = Attempts::new(self.hub.config.retries);
        loop {
            let answer = match send_with_redirects(&self.hub.client, &request, true).await {
                Ok(response)
                    if !response.status.is_success() && !response.status.is_redirection() =>
                {
                    Err(self.refused(&response, file))
                }
                other => other,
            };
            match answer {
                Ok(response) => return self.read_head(&response),
                Err(e) => attempts.back_off(e).await?,
            }
        }
    }

    fn read_head(&self, response: &Response) -> Result<Head> {
        let protocol = |reason: String| ClientError::Protocol {
            url: response.url().to_string(),
            reason,
        };
        let commit = response.header("x-repo-commit");
        if let Some(found) = commit.filter(|found| *found != self.commit.as_str()) {
            let (found, expected) = (Shown(found), self.commit);
            return Err(protocol(format!(
                "found commit \"{found}\", expected {expected}"
            )));
        }
        let linked = response.header("x-linked-etag");
        let Some(etag) = linked.or_else(|| response.header("etag")) else {
            return Err(protocol(
                "the response has no ETag, by which the cache names files".into(),
            ));
        };
        let size = response.number("x-linked-size");
        // The length of a redirect is that of its own text.
        let own = || {
            response
                .number("content-length")
                .filter(|_| response.status.is_success())
        };
        Ok(Head {
            etag: Etag::parse(etag)
                .map_err(|_| protocol(format!("\"{}\" is no usable ETag", Shown(etag))))?,
            size: size.or_else(own),
        })
    }

    /// Waits for another process that fetches the same file.
    async fn lock(&mut self, file: &str, etag: &Etag) -> Result<BlobLock> {
        let mut told = false;
        loop {
            if let Some(lock) = self.repo.try_lock(etag)? {
                return Ok(lock);
            }
            if !told {
                (self.watch)(PullEvent::Note(format!(
                    "waiting for another program that fetches {file}"
                )));
                told = true;
            }
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }

    /// Makes the blob complete, and proves that it is.
    async fn blob(&mut self, file: &str, head: &Head, lock: &BlobLock, limit: u64) -> Result<()> {
        let mut partial = Partial::open(&lock.incomplete, head)?;
        tracing::info!(file, bytes = head.size, done = partial.len, "fetching");
        (self.watch)(PullEvent::Begin {
            file,
            total: head.size,
            done: partial.len,
        });
        let mut resumed = partial.len > 0;
        loop {
            self.bytes(file, head, &mut partial, limit).await?;
            match partial.check(file, head) {
                Ok(verified) => {
                    if !verified {
                        let note =
                            format!("the hub gives no checksum for {file}: it is not checked");
                        (self.watch)(PullEvent::Note(note));
                    }
                    break;
                }
                // What was left by an earlier download may be what is wrong.
                Err(_) if resumed => {
                    resumed = false;
                    partial.restart(head)?;
                    (self.watch)(PullEvent::Progress(0));
                }
                Err(e) => {
                    drop(std::fs::remove_file(&lock.incomplete));
                    return Err(e);
                }
            }
        }
        partial.sync()?;
        tracing::info!(file, bytes = partial.len, "fetched");
        (self.watch)(PullEvent::End);
        Ok(())
    }

    /// Fetches the bytes that are missing, with as many requests as it takes.
    async fn bytes(
        &mut self,
        file: &str,
        head: &Head,
        partial: &mut Partial,
        limit: u64,
    ) -> Result<()> {
        let mut attempts = Attempts::new(self.hub.config.retries);
        while head.size.is_none_or(|size| partial.len < size) {
            let before = partial.len;
            match self.stream(file, head, partial, limit).await {
                Ok(()) => return Ok(()),
                Err(e) => {
                    if partial.len > before {
                        attempts.reset();
                    }
                    attempts.back_off(e).await?;
                }
            }
        }
        Ok(())
    }

    /// One request.
    async fn stream(
        &mut self,
        file: &str,
        head: &Head,
        partial: &mut Partial,
        limit: u64,
    ) -> Result<()> {
        let mut request = self.request(Method::GET, file)?;
        if partial.len > 0 {
            let range = header::HeaderValue::from_str(&format!("bytes={}-", partial.len));
            request
                .headers
                .extend(range.ok().map(|range| (header::RANGE, range)));
        }
        let mut response = send_with_redirects(&self.hub.client, &request, false).await?;
        match response.status.as_u16() {
            206 => check_range(&response, partial.len, head.size)?,
            // The whole file, whatever was asked for; and what is there may be longer than it.
            200 => partial.restart(head)?,
            416 if partial.len > 0 => {
                partial.restart(head)?;
                return Err(ClientError::Unreachable {
                    url: response.url().to_string(),
                    reason: "the server has less of the file than is here already".into(),
                });
            }
            _ => return Err(self.refused(&response, file)),
        }
        let most = head.size.unwrap_or(limit);
        while let Some(chunk) = response.chunk().await? {
            if chunk.len() as u64 > most - partial.len {
                return Err(damaged(
                    file,
                    "size in bytes",
                    "more".into(),
                    most.to_string(),
                ));
            }
            partial.write(&chunk)?;
            (self.watch)(PullEvent::Progress(partial.len));
        }
        match head.size {
            // Where a body ends with its connection, this is the only sign of a cut.
            Some(size) if partial.len < size => Err(ClientError::Unreachable {
                url: response.url().to_string(),
                reason: format!("the answer ended after {} of {size} bytes", partial.len),
            }),
            _ => Ok(()),
        }
    }
}

/// Holds the part that a server sends against the part that was asked for.
fn check_range(response: &Response, from: u64, size: Option<u64>) -> Result<()> {
    let range = response.header("content-range").unwrap_or_default();
    let parsed = || {
        let (span, total) = range.strip_prefix("bytes ")?.split_once('/')?;
        let start: u64 = span.split_once('-')?.0.parse().ok()?;
        let total: Option<u64> = match total {
            "*" => None,
            total => Some(total.parse().ok()?),
        };
        let same = size.is_none() || total.is_none() || total == size;
        (start == from && same).then_some(())
    };
    parsed().ok_or_else(|| ClientError::Protocol {
        url: response.url().to_string(),
        reason: format!(
            "found the part \"{}\", expected bytes from {from} on{}",
            Shown(range),
            size.map_or(String::new(), |size| format!(" of {size}"))
        ),
    })
}

fn damaged(file: &str, what: &'static str, found: String, expected: String) -> ClientError {
    ClientError::Damaged {
        file: Shown(file).to_string(),
        what,
        found,
        expected,
    }
}

/// The beginning of a blob, on disk, and what it hashes to so far.
struct Partial {
    path: Box<Path>,
    file: File,
    len: u64,
    digest: Digest,
}

impl Partial {
    /// Goes on with what an earlier download left, if that can be.
    fn open(path: &Path, head: &Head) -> Result<Self> {
        let failed = |e: std::io::Error| ClientError::disk(path, &e);
        // Written through a link, it would be another file that grows.
        if std::fs::symlink_metadata(path).is_ok_and(|meta| !meta.is_file()) {
            return Err(failed(std::io::Error::new(
                ErrorKind::AlreadyExists,
                "it is no plain file",
            )));
        }
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let mut partial = Self {
            path: path.into(),
            file: file.map_err(failed)?,
            len: 0,
            digest: Digest::new(&head.etag, head.size),
        };
        let there = partial.file.metadata().map_err(failed)?.len();
        // Without a hash, nothing would tell whether both parts belong together.
        if !partial.digest.is_verifiable() || head.size.is_none_or(|size| there > size) {
            partial.restart(head)?;
            return Ok(partial);
        }
        let mut buffer = vec![0; READ];
        loop {
            let read = partial.file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                return Ok(partial);
            }
            partial.digest.update(&buffer[..read]);
            partial.len += read as u64;
        }
    }

    /// Throws away what is there.
    fn restart(&mut self, head: &Head) -> Result<()> {
        let done = self
            .file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)));
        done.map_err(|e| ClientError::disk(&self.path, &e))?;
        self.len = 0;
        self.digest = Digest::new(&head.etag, head.size);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.map_err(|e| ClientError::disk(&self.path, &e))?;
        self.digest.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Whether it is what its name says; false where the name says nothing.
    fn check(&mut self, file: &str, head: &Head) -> Result<bool> {
        let digest = std::mem::replace(&mut self.digest, Digest::new(&head.etag, head.size));
        match digest.finish() {
            None => Ok(false),
            Some(found) if found == head.etag.as_str() => Ok(true),
            Some(found) => Err(damaged(file, "checksum", found, head.etag.to_string())),
        }
    }

    /// Waits until it is on the disk: a name must never stand for less than its contents.
    fn sync(&self) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| ClientError::disk(&self.path, &e))
    }
}
