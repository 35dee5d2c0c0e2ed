//! Manual pages and completions, generated from the definition of the command line.
//!
//! Each command has a page of its own: `ringfence(1)`, `ringfence-run(1)`, `ringfence-policy-check(1)`. The doc
//! comments of options are their text. Roles of Ringfence's own processes have neither a page nor a completion.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{Args, Command, CommandFactory};

use super::Cli;

/// Section of the manual for commands of users.
const SECTION: &str = "1";

const MAN_EXAMPLES: &str = "\
Examples:
  Read the page of `ringfence run`:
    ringfence man run | man -l -

  Install all pages for yourself; `man ringfence-run` finds them if ~/.local/bin is on your PATH:
    ringfence man --install ~/.local/share/man

  Install them for all users (as root):
    ringfence man --install /usr/local/share/man";

/// Arguments of `ringfence man`.
#[derive(Debug, Args)]
#[command(after_help = MAN_EXAMPLES)]
pub struct ManArgs {
    /// Write all pages below this directory of manual pages, into its subdirectory man1
    #[arg(long, value_name = "DIR")]
    pub install: Option<PathBuf>,

    /// Command whose page is printed, such as `run` or `policy check` [default: the page of ringfence]
    #[arg(value_name = "COMMAND", conflicts_with = "install")]
    pub page: Vec<String>,
}

impl ManArgs {
    /// Writes the page that the arguments select to `out`, or all pages to their directory.
    ///
    /// # Errors
    ///
    /// Returns an error of usage, as [`clap::Error`], for an unknown command; otherwise the errors of writing.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        match &self.install {
            Some(directory) => install(directory),
            None => Ok(render(&find(&self.page)?, out)?),
        }
    }
}

/// Returns the definition of the command line without hidden commands.
///
/// clap's generators list hidden commands too, and clap cannot remove one.
fn documented() -> Command {
    let full = Cli::command();
    let shown = full.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned();
    let mut command = Command::new("ringfence")
        .version(env!("CARGO_PKG_VERSION"))
        .about(full.get_about().cloned().unwrap_or_default())
        .long_about(full.get_long_about().cloned().unwrap_or_default())
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .subcommands(shown);
    command.build();
    command
}

/// Returns the definition of the command that `words` name.
fn find(words: &[String]) -> Result<Command, clap::Error> {
    let mut found = documented();
    for word in words {
        let next = found.find_subcommand(word).cloned();
        found = next.ok_or_else(|| {
            let why = format!(
                "there is no command `ringfence {}`; `ringfence --help` lists all",
                words.join(" ")
            );
            Cli::command().error(ErrorKind::InvalidValue, why)
        })?;
    }
    Ok(found)
}

/// Writes the page of one command.
fn render(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let source = concat!("ringfence ", env!("CARGO_PKG_VERSION"));
    let page = clap_mangen::Man::new(command.clone()).section(SECTION).source(source);
    page.manual("Ringfence").render(out)
}

/// Writes the pages of all commands into the subdirectory `man1` of `directory`, which is created if needed.
fn install(directory: &Path) -> anyhow::Result<()> {
    let pages = directory.join(format!("man{SECTION}"));
    fs::create_dir_all(&pages).with_context(|| pages.display().to_string())?;
    write_pages(&documented(), &pages)
}

fn write_pages(command: &Command, pages: &Path) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let path = pages.join(format!("{name}.{SECTION}"));
    let mut page = Vec::new();
    render(command, &mut page)?;
    fs::write(&path, page).with_context(|| path.display().to_string())?;
    command.get_subcommands().try_for_each(|sub| write_pages(sub, pages))
}

/// Writes the completion script for a shell.
pub fn write_completions(shell: clap_complete::Shell, out: &mut dyn Write) {
    clap_complete::generate(shell, &mut documented(), "ringfence", out);
}

#[cfg(test)]
mod tests;
