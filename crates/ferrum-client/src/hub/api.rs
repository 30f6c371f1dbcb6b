//! What a hub says about a repository, and what its refusals mean.

use super::{Hub, ModelName, PullEvent, Revision};
use crate::http::encode_segment;
use crate::http::{Method, Response, send_with_redirects};
use crate::hub::retry::Attempts;
use crate::{ClientError, Result};
use ferrum_formats::Shown;
use ferrum_formats::hub::{Commit, check_file_name};
use serde::Deserialize;

/// Longest description of a repository.
const MAX_LISTING: usize = 32 << 20;

/// Most files of a repository.
const MAX_FILES: usize = 100_000;

/// The files of a commit.
pub(super) struct Listing {
    pub(super) commit: Commit,
    pub(super) files: Vec<String>,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// Asks what a revision means and which files it has.
    pub(super) async fn list(
        &self,
        model: &ModelName,
        revision: &Revision,
        watch: &mut dyn FnMut(PullEvent<'_>),
    ) -> Result<Listing> {
        let mut attempts = Attempts::new(self.config.retries);
        let listing = loop {
            match self.list_once(model, revision).await {
                Ok(listing) => break listing,
                Err(e) => attempts.back_off(e).await?,
            }
        };
        let mut skipped = 0;
        let mut files = Vec::with_capacity(listing.files.len());
        for file in listing.files {
            match check_file_name(&file) {
                Ok(()) => files.push(file),
                Err(_) => skipped += 1,
            }
        }
        if skipped > 0 {
            watch(PullEvent::Note(format!(
                "{skipped} files of {} have impossible names",
                model.repo
            )));
        }
        Ok(Listing { files, ..listing })
    }

    async fn list_once(&self, model: &ModelName, revision: &Revision) -> Result<Listing> {
        let revision_part = encode_segment(revision.as_str());
        let path = format!("/api/models/{}/revision/{revision_part}", model.repo);
        let request = self.request(Method::GET, &path)?;
        let response = send_with_redirects(&self.client, &request, false).await?;
        if !response.status.is_success() {
            return Err(self.refused(&response, model, revision, None));
        }
        let url = response.url().to_string();
        let protocol = |reason: String| ClientError::Protocol {
            url: url.clone(),
            reason,
        };
        let body = response.bytes(MAX_LISTING).await?;
        let info: ModelInfo = serde_json::from_slice(&body)
            .map_err(|e| protocol(format!("the answer describes no model: {e}")))?;
        if info.siblings.len() > MAX_FILES {
            let found = info.siblings.len();
            return Err(protocol(format!("{found} files, the limit is {MAX_FILES}")));
        }
        Ok(Listing {
            commit: Commit::parse(&info.sha)
                .map_err(|_| protocol(format!("\"{}\" is no commit", Shown(&info.sha))))?,
            files: info
                .siblings
                .into_iter()
                .map(|sibling| sibling.rfilename)
                .collect(),
        })
    }

    /// The error of a status for a request of a model, or of a file of it.
    pub(super) fn refused(
        &self,
        response: &Response,
        model: &ModelName,
        revision: &Revision,
        file: Option<&str>,
    ) -> ClientError {
        let status = response.status.as_u16();
        let code = response.header("x-error-code").unwrap_or_default();
        let said = response
            .header("x-error-message")
            .map(|said| format!(": {}", Shown(said)));
        let said = said.unwrap_or_default();
        let (repo, hub) = (&model.repo, self.config.endpoint.to_string());
        let hub = hub.trim_end_matches('/');
        let known = self.config.token.is_some();
        let token = match known {
            true => "check the token (HF_TOKEN or --token-file) and what it may read",
            false => "set HF_TOKEN or give --token-file",
        };
        let (message, hint) = match (status, code) {
            (401 | 403, "GatedRepo") => (
                format!("{repo} is only for those who have accepted its terms{said}"),
                format!("accept them at {hub}/{repo}, then {token}"),
            ),
            (404, "RevisionNotFound") => (
                format!("{repo} has no revision \"{revision}\""),
                "check --revision; without it, main is taken".to_owned(),
            ),
            (404, "EntryNotFound") | (404, _) if file.is_some() => (
                format!(
                    "{repo} has no file \"{}\" at {revision}",
                    Shown(file.unwrap_or_default())
                ),
                String::new(),
            ),
            // A hub does not tell strangers whether there is such a model.
            (401 | 404, "RepoNotFound") | (404, _) => (
                format!(
                    "{hub} has no model {repo} (or no revision \"{revision}\" of it), or it is private"
                ),
                match known {
                    true => format!("check the name; for a private model, {token}"),
                    false => format!("check the name; for a private or gated model, {token}"),
                },
            ),
            (401 | 403, _) => (
                format!("{hub} does not let everybody read {repo} (status {status}){said}"),
                token.to_owned(),
            ),
            (429, _) => (
                format!("{hub} is asked too often{said}"),
                "wait a little".to_owned(),
            ),
            (500.., _) => (
                format!("{hub} has a problem (status {status}){said}"),
                "try again later; what has come is kept".to_owned(),
            ),
            _ => (
                format!("{}: status {status}, expected 200{said}", response.url()),
                "check the address of the hub (--endpoint, HF_ENDPOINT)".to_owned(),
            ),
        };
        ClientError::Refused {
            status,
            retry_after: response.number("retry-after"),
            message,
            hint,
        }
    }
}
