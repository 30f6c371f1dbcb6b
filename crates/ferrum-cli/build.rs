//! Tells the program which commit and target it is built from, for `ferrum --version`.
//!
//! It never fails: without git, or outside a clone of this repository, the commit is unknown.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = std::env::var("TARGET").unwrap_or_else(|_| "unknown".into());
    println!("cargo::rustc-env=FERRUM_TARGET={target}");
    let commit = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(|dir| PathBuf::from(dir).join("../.."))
        .and_then(|root| commit(&root));
    let commit = commit.unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=FERRUM_COMMIT={commit}");
}

/// The commit of the clone at `root`. Cargo asks again when it is another.
fn commit(root: &Path) -> Option<String> {
    // A repository around an unpacked archive is not ours.
    let top = PathBuf::from(git(root, &["rev-parse", "--show-toplevel"])?);
    if top.canonicalize().ok()? != root.canonicalize().ok()? {
        return None;
    }
    // HEAD changes with the branch, its log with each commit.
    for file in ["HEAD", "logs/HEAD"] {
        let path = root.join(git(root, &["rev-parse", "--git-path", file])?);
        // Of a file that is not there, cargo would ask at each build.
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(root, &["rev-parse", "--short=12", "HEAD"])
}

fn git(root: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .current_dir(root)
        .args(args)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.trim();
    (output.status.success() && !line.is_empty()).then(|| line.to_owned())
}
