//! `ferrum completions` and `ferrum man`: what shells and `man` know of this program, made from its
//! command line.

use crate::args::{self, CompletionsArgs, ManArgs};
use crate::failure::{Failure, Outcome};
use crate::ui;

pub(crate) fn completions(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut args::command(), "ferrum", &mut script);
    ui::show_bytes(&script)
}

pub(crate) fn man(args: &ManArgs) -> Outcome {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(args::command()).render(&mut page)?;
        return ui::show_bytes(&page);
    };
    let failed = |e: std::io::Error| Failure::new(format!("{}: {e}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(args::command(), dir).map_err(failed)
}
