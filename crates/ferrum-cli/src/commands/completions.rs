//! `ferrum completions` and `ferrum man`: what shells and `man` know of this program, made from its
//! command line.

use crate::args::{self, CompletionsArgs, ManArgs};
use crate::failure::{Failure, Outcome};
use crate::ui;

pub(crate) fn completions(wanted: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(wanted.shell, &mut args::command(), "ferrum", &mut script);
    ui::show_bytes(&script)
}

pub(crate) fn man(wanted: &ManArgs) -> Outcome {
    // The help of a command has no page of its own.
    let command = args::command().disable_help_subcommand(true);
    let Some(dir) = &wanted.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return ui::show_bytes(&page);
    };
    let failed = |e: std::io::Error| Failure::new(format!("{}: {e}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(command, dir).map_err(failed)
}
