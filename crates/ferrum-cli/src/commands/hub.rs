//! `ferrum pull`, `ferrum list` and `ferrum rm`: the models of the cache.

use crate::args::{ListArgs, PullArgs, RmArgs};
use crate::failure::{Failure, Outcome};
use crate::hub;
use crate::ui::{human_bytes, say, say_always, show, show_json};
use ferrum_formats::Shown;
use ferrum_formats::hub::{
    CachedModel, CachedRepo, CachedSnapshot, DownloadScope, HubCache, ModelName, Revision,
};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::UNIX_EPOCH;

/// Digits of a commit for people.
const SHORT: usize = 8;

pub(crate) fn pull(args: &PullArgs) -> Outcome {
    let reference = hub::Reference::parse(&args.model)?;
    let pulled = hub::pull(&reference, &args.hub)?;
    let name = &reference.name;
    let commit = &pulled.commit[..SHORT.min(pulled.commit.len())];
    say(&match pulled.fetched {
        0 => format!("{name} at {commit} is here already"),
        1 => format!("{name} at {commit}: fetched 1 file"),
        n => format!("{name} at {commit}: fetched {n} files"),
    });
    show(&format!("{}\n", pulled.path.display()))
}

pub(crate) fn list(args: &ListArgs) -> Outcome {
    let cache = hub::cache(args.cache_dir.as_deref())?;
    let (models, problems) = cache.models()?;
    for problem in problems {
        say(&format!("warning: {problem}"));
    }
    if args.json {
        let models: Vec<_> = models.iter().map(|model| as_json(&cache, model)).collect();
        return show_json(&json!({"cache": cache.root().display().to_string(), "models": models}));
    }
    if models.is_empty() {
        say(&format!(
            "there are no models in {}\nhint: `ferrum pull ORG/NAME` fetches one",
            cache.root().display()
        ));
        return Ok(());
    }
    let mut rows = vec![["MODEL", "REVISION", "SIZE"].map(str::to_owned)];
    for model in &models {
        let repo = cache.repo(&model.repo);
        for snapshot in &model.snapshots {
            rows.extend(snapshot_rows(&repo, snapshot));
        }
    }
    show(&table(&rows))
}

/// What of a commit can be given as MODEL, one a row.
fn snapshot_rows(repo: &CachedRepo, snapshot: &CachedSnapshot) -> Vec<[String; 3]> {
    let commit = &snapshot.commit.as_str()[..SHORT];
    let at = match snapshot.refs.as_slice() {
        [] => commit.to_owned(),
        refs => format!("{} ({commit})", refs.join(", ")),
    };
    let ggufs = snapshot
        .files
        .iter()
        .filter(|file| file.name.to_lowercase().ends_with(".gguf"));
    let mut rows: Vec<_> = ggufs
        .map(|file| {
            let name = format!("{}:{}", repo.id(), Shown(&file.name));
            [name, at.clone(), human_bytes(file.bytes)]
        })
        .collect();
    let rest = snapshot
        .files
        .iter()
        .filter(|file| !file.name.to_lowercase().ends_with(".gguf"));
    let bytes = rest.clone().map(|file| file.bytes).sum();
    let weights = rest.clone().any(|file| file.name.ends_with(".safetensors"));
    if weights || rows.is_empty() {
        let complete = repo.find(
            &ModelName {
                repo: repo.id().clone(),
                file: None,
            },
            &Revision::from(snapshot.commit.clone()),
            DownloadScope::Model,
        );
        let state = match (complete, weights) {
            (Ok(Some(_)), _) => "",
            (_, true) => ", incomplete",
            (_, false) => ", no weights",
        };
        rows.push([
            repo.id().to_string(),
            format!("{at}{state}"),
            human_bytes(bytes),
        ]);
    }
    rows
}

fn table(rows: &[[String; 3]]) -> String {
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let (name, revision) = (width(0), width(1));
    rows.iter().fold(String::new(), |mut text, row| {
        let _ = writeln!(
            text,
            "{:<name$}  {:<revision$}  {:>10}",
            row[0], row[1], row[2]
        );
        text
    })
}

fn as_json(cache: &HubCache, model: &CachedModel) -> Value {
    let repo = cache.repo(&model.repo);
    let snapshots: Vec<_> = model
        .snapshots
        .iter()
        .map(|snapshot| {
            let files: Vec<_> = snapshot
                .files
                .iter()
                .map(|file| {
                    let modified = file
                        .modified
                        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                    let modified = modified.map(|since| since.as_secs());
                    json!({"name": file.name, "bytes": file.bytes, "modified": modified})
                })
                .collect();
            json!({
                "commit": snapshot.commit.as_str(),
                "refs": snapshot.refs,
                "path": repo.snapshot(&snapshot.commit).display().to_string(),
                "files": files,
            })
        })
        .collect();
    json!({"model": model.repo.to_string(), "bytes": model.bytes, "snapshots": snapshots})
}

pub(crate) fn rm(args: &RmArgs) -> Outcome {
    let name = hub::Reference::parse(&args.model)?.name;
    let cache = hub::cache(args.cache_dir.as_deref())?;
    let revision = args
        .revision
        .as_deref()
        .map(|text| hub::revision(Some(text)))
        .transpose()?;
    let removal = cache
        .repo(&name.repo)
        .removal(revision.as_ref(), name.file.as_deref())?;
    let what = match (removal.whole, removal.files.len()) {
        (true, _) => format!("all of {}", name.repo),
        (false, 1) => format!("1 file of {}", name.repo),
        (false, n) => format!("{n} files of {}", name.repo),
    };
    let size = human_bytes(removal.bytes);
    if !args.yes && !agreed(&format!("remove {what} ({size})?"))? {
        say("nothing was removed");
        return Ok(());
    }
    removal.execute()?;
    say(&format!("removed {what} ({size})"));
    Ok(())
}

/// Asks the user on the terminal.
fn agreed(question: &str) -> Outcome<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(format!(
            "{question} nobody is there to say\nhint: --yes removes without asking"
        )));
    }
    say_always(&format!("{question} [y/N]"));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
