//! Models that are given by name: from flags and the hub's own variables to a path in the cache.

use crate::args::HubArgs;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::ui::{self, Progress};
use ferrum_client::ClientError;
use ferrum_client::http::{Proxy, Timeouts, Url};
use ferrum_client::hub::{Hub, HubConfig, PullEvent, Pulled, Retries};
use ferrum_formats::hub::{DownloadScope, HubCache, ModelName, Revision};
use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const ENDPOINT: &str = "https://huggingface.co";

/// The same hub, as short addresses have it.
const SHORT_ENDPOINT: &str = "https://hf.co";

/// Endings of what is a file and no model of a hub, should it not be there.
const FILES: [&str; 6] = ["gguf", "safetensors", "json", "jinja", "bin", "txt"];

/// A model of a hub, as an argument has it: by name, or by the address of its page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) name: ModelName,
    /// The revision in an address.
    revision: Option<Revision>,
    /// The hub that an address leads to.
    hub: Option<Url>,
}

impl Reference {
    /// Reads `ORG/NAME[:FILE]` or `https://HOST/ORG/NAME`, which may go on as the pages of hubs do:
    /// `/tree/REV`, `/blob/REV/FILE` or `/resolve/REV/FILE`. The hub's own address needs no `https://`.
    pub(crate) fn parse(text: &str) -> Outcome<Self> {
        let Some(address) = address(text) else {
            return Ok(Self {
                name: ModelName::parse(text)?,
                revision: None,
                hub: None,
            });
        };
        let url = Url::parse(&address)?;
        let path = url.path().trim_matches('/');
        let parts: Vec<_> = path.splitn(5, '/').collect();
        let (repo, page) = match parts.as_slice() {
            [org, name, page @ ..] => (format!("{org}/{name}"), page),
            _ => (path.to_owned(), &[][..]),
        };
        let (revision, file) = match *page {
            [] => (None, None),
            ["tree", revision] => (Some(revision), None),
            ["blob" | "resolve", revision, file] => (Some(revision), Some(file)),
            _ => {
                return Err(Failure::new(format!(
                    "{text} is no page of a model\nhint: expected https://HOST/ORG/NAME, maybe with /tree/REVISION, or /blob/REVISION/FILE"
                )));
            }
        };
        let name = match file {
            Some(file) => format!("{repo}:{file}"),
            None => repo,
        };
        Ok(Self {
            name: ModelName::parse(&name)?,
            // A slash inside a name is written so.
            revision: revision
                .map(|revision| Revision::parse(&revision.replace("%2F", "/")))
                .transpose()?,
            hub: Some(url),
        })
    }

    /// The revision to take: of the address, else of the flag.
    fn revision(&self, flag: Option<&str>) -> Outcome<Revision> {
        match (&self.revision, flag) {
            (Some(own), Some(flag)) if own.as_str() != flag => Err(Failure::new(format!(
                "the address says revision {own}, and --revision says {flag}"
            ))),
            (Some(own), _) => Ok(own.clone()),
            (None, flag) => revision(flag),
        }
    }

    /// Says so where an address leads to another hub than the one that is asked.
    fn remark(&self, endpoint: &Url) {
        let origin = |address: &str| Url::parse(address).map(|url| url.origin()).ok();
        let is_short = |hub: &Url| {
            Some(hub.origin()) == origin(SHORT_ENDPOINT)
                && Some(endpoint.origin()) == origin(ENDPOINT)
        };
        let other = |hub: &&Url| hub.origin() != endpoint.origin() && !is_short(hub);
        let Some(hub) = self.hub.as_ref().filter(other) else {
            return;
        };
        ui::say(&format!(
            "note: {} is asked for at {endpoint}, and not at {}\nhint: --endpoint or HF_ENDPOINT says where the hub is",
            self.name,
            hub.origin()
        ));
    }
}

/// The address of a page, if `text` is one.
fn address(text: &str) -> Option<Cow<'_, str>> {
    if ["https://", "http://"]
        .iter()
        .any(|scheme| text.starts_with(scheme))
    {
        return Some(text.into());
    }
    let hosts = [ENDPOINT, SHORT_ENDPOINT].map(|hub| hub.trim_start_matches("https://"));
    let (host, _) = text.split_once('/')?;
    hosts
        .contains(&host)
        .then(|| format!("https://{text}").into())
}

/// The model of a hub that an argument means: a path that exists is none, and neither is what can only
/// be a path.
fn reference(argument: &Path) -> Outcome<Option<Reference>> {
    let Some(text) = argument.to_str().filter(|_| !argument.exists()) else {
        return Ok(None);
    };
    if address(text).is_some() {
        return Reference::parse(text).map(Some);
    }
    let Ok(reference) = Reference::parse(text) else {
        return Ok(None);
    };
    let repo = reference.name.repo.to_string();
    let file = Path::new(&repo).extension().and_then(|e| e.to_str());
    Ok((!file.is_some_and(|e| FILES.contains(&e))).then_some(reference))
}

/// Whether an argument is no path but names a model of a hub, if maybe wrongly.
pub(crate) fn is_name(argument: &Path) -> bool {
    !matches!(reference(argument), Ok(None))
}

/// The name of a model of a hub; `None` for paths.
pub(crate) fn name(argument: &Path) -> Option<ModelName> {
    Some(reference(argument).ok()??.name)
}

/// The model of the cache that is named without its ORG, as `NAME` or `NAME:FILE`; letters may be small.
///
/// # Errors
/// Several models of the cache have that name.
pub(crate) fn in_cache(argument: &Path, args: &HubArgs) -> Outcome<Option<Reference>> {
    let word = argument.to_str().filter(|text| !text.contains(['/', '\\']));
    let Some(word) = word.filter(|_| !argument.exists()) else {
        return Ok(None);
    };
    let (wanted, file) = match word.split_once(':') {
        Some((name, file)) => (name, Some(file)),
        None => (word, None),
    };
    // Without a cache that can be read, the word is none of its names.
    let models = cache(args.cache_dir.as_deref()).and_then(|cache| Ok(cache.models()?.0));
    let repos = models.unwrap_or_default().into_iter();
    let repos = repos.map(|model| model.repo.to_string());
    let has_name = |repo: &String| {
        let name = repo.split_once('/').map(|(_, name)| name);
        name.is_some_and(|name| name.eq_ignore_ascii_case(wanted))
    };
    let found: Vec<_> = repos.filter(has_name).collect();
    match found.as_slice() {
        [] => Ok(None),
        [repo] => {
            let name = file.map_or(repo.clone(), |file| format!("{repo}:{file}"));
            Reference::parse(&name).map(Some)
        }
        several => Err(Failure::new(format!(
            "{word} may be any of several models in the cache\nhint: give one of {}",
            several.join(", ")
        ))),
    }
}

/// Where a model lies that is given as a path or by name. What the cache has is taken as it is; what it
/// lacks is fetched.
pub(crate) fn locate(argument: &Path, args: &HubArgs, want: DownloadScope) -> Outcome<PathBuf> {
    let reference = match reference(argument)? {
        Some(reference) => Some(reference),
        None => in_cache(argument, args)?,
    };
    let Some(reference) = reference else {
        return Ok(argument.to_owned());
    };
    let cache = cache(args.cache_dir.as_deref())?;
    let revision = reference.revision(args.revision.as_deref())?;
    let name = &reference.name;
    if let Some(path) = cache.repo(&name.repo).find(name, &revision, want)? {
        let file = path
            .file_name()
            .filter(|_| path.is_file() && name.file.is_none());
        if let Some(file) = file {
            ui::say(&format!("note: {name} is {} here", file.display()));
        }
        return Ok(path);
    }
    if offline(args) {
        let root = cache.root().display();
        return Err(Failure::new(format!(
            "{name} is no path, and not all of it is in the cache ({root})\nhint: without --offline and HF_HUB_OFFLINE it is fetched"
        )));
    }
    let (hub, endpoint) = hub(args, cache)?;
    reference.remark(&endpoint);
    ui::say(&format!(
        "note: {name} is not in the cache; fetching it from {endpoint}"
    ));
    Ok(fetch(&hub, name, &revision, want)?.path)
}

/// Fetches a model, or what is new of it.
pub(crate) fn pull(reference: &Reference, args: &HubArgs) -> Outcome<Pulled> {
    if offline(args) {
        return Err(Failure::new(
            "nothing can be fetched while --offline or HF_HUB_OFFLINE is set",
        ));
    }
    let revision = reference.revision(args.revision.as_deref())?;
    let (hub, endpoint) = hub(args, cache(args.cache_dir.as_deref())?)?;
    reference.remark(&endpoint);
    fetch(&hub, &reference.name, &revision, DownloadScope::Model)
}

/// The cache: as the flag says, else the variables.
pub(crate) fn cache(flag: Option<&Path>) -> Outcome<HubCache> {
    let root = flag.map(Path::to_owned);
    let root = root.or_else(|| path_in("HF_HUB_CACHE"));
    let root = root.or_else(|| path_in("HUGGINGFACE_HUB_CACHE"));
    let root = root.or_else(|| Some(home()?.join("hub")));
    root.map(HubCache::new).ok_or_else(|| {
        Failure::new("there is no folder for models: no home is known\nhint: give --cache-dir")
    })
}

/// The revision that is asked for.
pub(crate) fn revision(flag: Option<&str>) -> Outcome<Revision> {
    Ok(flag.map(Revision::parse).transpose()?.unwrap_or_default())
}

fn hub(args: &HubArgs, cache: HubCache) -> Outcome<(Hub, Url)> {
    let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
    let endpoint = args.endpoint.clone().or_else(|| text("HF_ENDPOINT"));
    let endpoint = Url::parse(endpoint.as_deref().unwrap_or(ENDPOINT))?;
    let proxy = Proxy::from_env(text)
        .map_err(|e| Failure::new(format!("HTTPS_PROXY or ALL_PROXY: {e}")))?;
    let config = HubConfig {
        endpoint: endpoint.clone(),
        token: token(args)?,
        cache,
        timeouts: Timeouts::default(),
        retries: Retries::default(),
        proxy,
    };
    Ok((Hub::new(config)?, endpoint))
}

fn token(args: &HubArgs) -> Outcome<Option<String>> {
    let read = |path: &Path| -> Outcome<Option<String>> {
        let text = input::read_json_text(path)?;
        Ok(Some(text.trim().to_owned()).filter(|token| !token.is_empty()))
    };
    if let Some(path) = &args.token_file {
        let none = || Failure::new(format!("{}: there is no token in it", path.display()));
        return read(path)?.ok_or_else(none).map(Some);
    }
    let token = variable("HF_TOKEN").and_then(|value| value.into_string().ok());
    let token = token
        .map(|token| token.trim().to_owned())
        .filter(|token| !token.is_empty());
    if token.is_some() {
        return Ok(token);
    }
    let file = path_in("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")));
    match file.filter(|path| path.is_file()) {
        Some(path) => read(&path),
        None => Ok(None),
    }
}

fn offline(args: &HubArgs) -> bool {
    let variable = variable("HF_HUB_OFFLINE").and_then(|value| value.into_string().ok());
    let yes = |value: String| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str());
    args.offline || variable.is_some_and(yes)
}

/// The folder that all programs of the hub share.
fn home() -> Option<PathBuf> {
    path_in("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")))
}

/// The folder in which programs keep what they can make again.
pub(crate) fn user_cache() -> Option<PathBuf> {
    path_in("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")))
}

/// A path in a variable, whose `~` is the user's home.
fn path_in(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(variable(name)?);
    match path.strip_prefix("~") {
        Ok(rest) => Some(std::env::home_dir()?.join(rest)),
        Err(_) => Some(path),
    }
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn fetch(hub: &Hub, name: &ModelName, revision: &Revision, want: DownloadScope) -> Outcome<Pulled> {
    let mut bar: Option<(Progress, u64)> = None;
    let pulled = hub.pull(name, revision, want, &mut |event| match event {
        PullEvent::Begin { file, total, done } => {
            // Without an end there is nothing to draw.
            bar = total.filter(|&total| done < total).map(|total| {
                let mut bar = Progress::bytes(file);
                bar.set(done, total);
                (bar, total)
            });
        }
        PullEvent::Progress(done) => {
            if let Some((bar, total)) = &mut bar {
                bar.set(done, *total);
            }
        }
        PullEvent::End => bar = None,
        PullEvent::Note(note) => ui::say(&format!("note: {note}")),
    });
    pulled.map_err(|e| match e {
        ClientError::Unreachable { .. } | ClientError::Timeout { .. } => Failure::new(format!(
            "{e}\nhint: check the connection and the address of the hub (--endpoint, HF_ENDPOINT); what has come is kept"
        )),
        other => other.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::Reference;

    #[test]
    fn a_model_has_a_name_or_the_address_of_its_page() {
        for (text, name, revision) in [
            ("org/demo", "org/demo", None),
            ("org/demo:Q4_K_M", "org/demo:Q4_K_M", None),
            ("https://hub.example.org/org/demo", "org/demo", None),
            ("huggingface.co/org/demo", "org/demo", None),
            ("hf.co/org/demo:Q4_K_M", "org/demo:Q4_K_M", None),
            ("hf.co/org/demo/tree/v2", "org/demo", Some("v2")),
            ("http://127.0.0.1:9/org/demo/", "org/demo", None),
            ("https://h.example/org/demo?show=1#use", "org/demo", None),
            ("https://h.example/o/d/tree/main", "o/d", Some("main")),
            ("https://h.example/org/demo/tree/v2", "org/demo", Some("v2")),
            (
                "https://h.example/o/d/tree/refs%2Fpr%2F1",
                "o/d",
                Some("refs/pr/1"),
            ),
            (
                "https://h.example/o/d/blob/main/x/y.gguf",
                "o/d:x/y.gguf",
                Some("main"),
            ),
            (
                "https://h.example/o/d/resolve/v1/y.gguf",
                "o/d:y.gguf",
                Some("v1"),
            ),
        ] {
            let found = Reference::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(found.name.to_string(), name, "{text}");
            assert_eq!(
                found.revision.as_ref().map(|r| r.as_str()),
                revision,
                "{text}"
            );
        }
        for text in [
            "org",
            "https://h.example",
            "https://h.example/org",
            "hf.co/org",
            "h.example/org/demo",
            "https://h.example/org/demo/tree",
            "https://h.example/org/demo/tree/main/folder",
            "https://h.example/org/demo/discussions",
            "https://h.example/org/../demo",
            "https://h.example/org/demo/tree/..%2F..",
            "https://me:secret@h.example/org/demo",
            "ftp://h.example/org/demo",
        ] {
            assert!(Reference::parse(text).is_err(), "{text}");
        }
    }
}
