//! `ferrum licenses`: what this program is made of beside its own code, and under which licences.
//!
//! `tools/licenses/make.py` writes both files.

use crate::args::LicensesArgs;
use crate::failure::Outcome;
use crate::ui::{show, show_json};
use serde::Serialize;

/// A package a line: name, version, licence and use, with tabs between them.
const PACKAGES: &str = include_str!("../licenses/packages.tsv");
const TEXTS: &str = include_str!("../licenses/texts.txt");

/// A crate or library in the binary.
#[derive(Serialize)]
struct Package {
    name: &'static str,
    version: &'static str,
    /// As SPDX writes it.
    license: &'static str,
}

pub(crate) fn licenses(args: &LicensesArgs) -> Outcome {
    if args.full {
        return show(TEXTS);
    }
    let packages = packages();
    if args.json {
        return show_json(&packages);
    }
    let widest = |text: fn(&Package) -> &str| packages.iter().map(|p| text(p).len()).max();
    let name_width = widest(|package| package.name).unwrap_or(0);
    let version_width = widest(|package| package.version).unwrap_or(0);
    let lines = packages.iter().map(|package| {
        let (name, version) = (package.name, package.version);
        let license = package.license;
        format!("{name:<name_width$}  {version:<version_width$}  {license}\n")
    });
    show(&lines.collect::<String>())
}

/// What is in the binary: macros, build scripts and tests are not.
fn packages() -> Vec<Package> {
    let rows = PACKAGES.lines().filter_map(|line| {
        let mut fields = line.split('\t');
        let package = Package {
            name: fields.next()?,
            version: fields.next()?,
            license: fields.next()?,
        };
        (fields.next()? != "build").then_some(package)
    });
    rows.collect()
}
