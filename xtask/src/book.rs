//! `cargo xtask book`: the documentation as a site, made by mdBook.
//!
//! ```text
//!  docs/README.md ── parts and their pages ─┐
//!  docs/**, pages that they link to ────────┼─ pages ── src/, SUMMARY.md ── mdbook ── site/ ── check of links
//!  ringfence man ── manual ─────────────────┘                 docs/book.toml ┘
//! ```
//!
//! The index of `docs`, which `tidy` keeps complete, is the list of chapters, so there is no second list. [`pages`]
//! collects the pages and rewrites their links, [`manual`] converts the manual pages, [`site`] checks the result. Without
//! mdBook only the sources are made.

mod manual;
mod pages;
mod site;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use taskkit::exec::Cmd;
use taskkit::tools::{self, Toolbox};

use pages::Pages;

/// Arguments of `cargo xtask book`.
#[derive(Args)]
pub(crate) struct BookArgs {
    /// Folder for the site and its sources; by default `book` in the target directory
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Take the manual pages from this `ringfence`, which exists already, instead of building it
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs `cargo xtask book`. Returns `false` if mdBook failed or the site has a broken link.
pub(crate) fn run(args: &BookArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let folder = args.output.clone().unwrap_or_else(|| target.join("book"));
    let folder = std::path::absolute(folder)?;
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => {
            let build = ["build", "--locked", "--package", "ringfence", "--bin", "ringfence"];
            anyhow::ensure!(Cmd::cargo().args(build).run(root)?, "ringfence does not build");
            target.join("debug/ringfence")
        }
    };
    let sources = folder.join("src");
    let config = folder.join("book.toml");
    // The sources are replaced as a whole.
    anyhow::ensure!(
        !sources.exists() || config.is_file(),
        "{} exists and is not a book's: choose another folder",
        sources.display()
    );
    for old in [&sources, &folder.join("site")].into_iter().filter(|old| old.exists()) {
        std::fs::remove_dir_all(old).with_context(|| old.display().to_string())?;
    }
    std::fs::create_dir_all(&sources)?;
    let manual = manual_pages(&program, &folder)?;
    let pages = Pages::collect(root)?;
    for (place, text) in pages.sources(&manual) {
        write(&sources.join(place), text.as_bytes())?;
    }
    for asset in pages.assets() {
        write(&sources.join(pages::place(asset)), &std::fs::read(root.join(asset))?)?;
    }
    write(&config, &std::fs::read(root.join("docs/book.toml"))?)?;
    let toolbox = Toolbox::new(root, target);
    let missing = toolbox.missing(&[&tools::MDBOOK]);
    if !missing.is_empty() {
        let how = tools::how_to_get(&missing);
        println!("SKIPPED: the site ({how}); its sources are in {}", sources.display());
        return Ok(true);
    }
    let built = Cmd::new("mdbook").args(["build"]).args([&folder]).env("PATH", toolbox.path());
    if !built.run(root)? {
        return Ok(false);
    }
    let broken = site::broken_links(&folder.join("site"))?;
    for link in &broken {
        println!("{link}");
    }
    println!("{}", folder.join("site/index.html").display());
    Ok(broken.is_empty())
}

/// Returns the manual pages by their name, as Markdown.
fn manual_pages(program: &Path, folder: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let directory = folder.join("man");
    let install = Cmd::new(program).args(["man", "--install"]).args([&directory]);
    anyhow::ensure!(install.run(folder)?, "the manual pages cannot be written");
    let mut roff = BTreeMap::new();
    for entry in std::fs::read_dir(directory.join("man1"))? {
        let path = entry?.path();
        let name = path.file_stem().context("a manual page has a name")?;
        roff.insert(name.to_string_lossy().into_owned(), std::fs::read_to_string(&path)?);
    }
    let names: BTreeSet<String> = roff.keys().cloned().collect();
    let markdown = |(name, text): (String, String)| {
        let page = manual::markdown(&name, &text, &names).with_context(|| name.clone())?;
        Ok((name, page))
    };
    roff.into_iter().map(markdown).collect()
}

fn write(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let folder = path.parent().context("a file is in a folder")?;
    std::fs::create_dir_all(folder)?;
    std::fs::write(path, content).with_context(|| path.display().to_string())
}
