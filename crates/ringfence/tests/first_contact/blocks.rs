//! Parser for pages: blocks of shell commands and the markers above them. The grammar is in docs/testing.md,
//! "Commands in pages".

#![allow(unreachable_pub, reason = "the modules of one program use it")]

/// Place in which the commands of a block run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This test.
    Local,
    /// A scenario of `cargo xtask vm xen`.
    Xen,
    /// A scenario of `cargo xtask clients`.
    Clients,
}

/// Marker of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marker {
    /// The block runs.
    Runs {
        place: Place,
        is_root: bool,
        group: Option<String>,
        /// Programs that it starts, besides those that every system has.
        needs: Vec<String>,
    },
    /// The block illustrates, and runs nowhere.
    Shows,
}

/// Block of shell commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Line of the page with the first command, from 1.
    pub line: usize,
    pub marker: Marker,
    pub text: String,
}

/// Names of languages by which a fence begins a block of shell commands.
const SHELLS: [&str; 5] = ["sh", "bash", "shell", "console", "zsh"];
/// Programs that begin a command line. An indented block has no marker, so it must not contain them.
const PROGRAMS: [&str; 4] = ["ringfence ", "ringfence-bench ", "cargo xtask ", "$ "];

/// Returns the blocks of shell commands of a page.
///
/// # Errors
///
/// Returns the problems of the page, each with its line.
pub fn parse(page: &str) -> Result<Vec<Block>, Vec<String>> {
    let (mut blocks, mut problems) = (Vec::new(), Vec::new());
    let mut lines = page.lines().enumerate().map(|(at, line)| (at + 1, line));
    let mut marker: Option<(usize, Result<Marker, String>)> = None;
    while let Some((number, line)) = lines.next() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            let above = marker.take();
            let inside: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| line.trim() != "```")
                .collect();
            let is_shell = SHELLS.contains(&language.trim());
            match (is_shell, above) {
                (true, Some((_, Ok(marker)))) => {
                    let text = inside.iter().map(|line| format!("{line}\n")).collect();
                    blocks.push(Block { line: number + 1, marker, text });
                }
                (true, Some((at, Err(why)))) => problems.push(format!("line {at}: {why}")),
                (true, None) => problems.push(format!(
                    "line {number}: a block of commands without a marker (docs/testing.md, \"Commands in pages\")"
                )),
                (false, Some((at, _))) => problems.push(format!("line {at}: a marker without commands")),
                (false, None) => {}
            }
            continue;
        }
        if let Some((at, _)) = marker.take() {
            problems.push(format!("line {at}: a marker must be on the line above its block"));
        }
        marker = parse_marker(line).map(|parsed| (number, parsed));
        let indented = line.strip_prefix("    ").map(str::trim_start);
        if indented.is_some_and(|text| PROGRAMS.iter().any(|program| text.starts_with(program))) {
            problems.push(format!("line {number}: commands belong in a block of ```sh"));
        }
    }
    if problems.is_empty() { Ok(blocks) } else { Err(problems) }
}

/// Parses a line that is a marker.
fn parse_marker(line: &str) -> Option<Result<Marker, String>> {
    let comment = line.trim().strip_prefix("<!--")?.strip_suffix("-->")?.trim();
    if let Some(reason) = comment.strip_prefix("shows:") {
        let is_empty = reason.trim().is_empty();
        return Some(if is_empty {
            Err("`shows:` needs a reason".to_owned())
        } else {
            Ok(Marker::Shows)
        });
    }
    Some(parse_runs(comment.strip_prefix("runs:")?))
}

fn parse_runs(text: &str) -> Result<Marker, String> {
    let mut words = text.split_whitespace();
    let place = match words.next() {
        Some("local") => Place::Local,
        Some("xen") => Place::Xen,
        Some("clients") => Place::Clients,
        other => {
            return Err(format!("`runs: {}`: local, xen or clients", other.unwrap_or_default()));
        }
    };
    let (mut is_root, mut group, mut needs) = (false, None, Vec::new());
    for word in words {
        match word.split_once('=') {
            None if word == "root" => is_root = true,
            Some(("group", name)) if !name.is_empty() => group = Some(name.to_owned()),
            Some(("needs", list)) => {
                needs = list.split(',').map(str::to_owned).collect();
                if needs.iter().any(String::is_empty) {
                    return Err(format!("`{word}`: names of programs, separated by commas"));
                }
            }
            _ => return Err(format!("`{word}`: root, group=NAME or needs=PROGRAM,PROGRAM")),
        }
    }
    Ok(Marker::Runs { place, is_root, group, needs })
}

/// Blocks of a page that run in one shell, one after the other.
#[derive(Debug, PartialEq, Eq)]
pub struct Script {
    /// Line of the page with the first command.
    pub line: usize,
    pub is_root: bool,
    pub needs: Vec<String>,
    /// Commands, each on the line that it has in the page. The other lines are empty.
    pub text: String,
}

impl Script {
    /// Returns the line of the page with the last command that the trace of the shell (`set -x`) shows.
    pub fn last_line(&self, trace: &str) -> usize {
        let shown = trace.lines().rev().filter_map(|line| line.strip_prefix("+ "));
        let found = shown.filter_map(|command| {
            // The shell shows words without their quotes, so only the first ones are compared.
            let mut words = command.split(' ');
            let first = [words.next()?, words.next().unwrap_or_default()].join(" ");
            self.text.lines().position(|line| line.contains(first.trim_end())).map(|at| at + 1)
        });
        found.into_iter().next().unwrap_or(self.line)
    }
}

/// Joins the local blocks of a page to scripts.
pub fn scripts(blocks: &[Block]) -> Vec<Script> {
    let mut scripts: Vec<(Option<&str>, Script)> = Vec::new();
    for block in blocks {
        let Marker::Runs { place: Place::Local, is_root, group, needs } = &block.marker else {
            continue;
        };
        let group = group.as_deref();
        let found = scripts.iter().position(|(own, _)| own.is_some() && *own == group);
        let at = found.unwrap_or_else(|| {
            let text = String::new();
            scripts.push((group, Script { line: block.line, is_root: false, needs: vec![], text }));
            scripts.len() - 1
        });
        let script = &mut scripts[at].1;
        script.is_root |= is_root;
        for need in needs {
            if !script.needs.contains(need) {
                script.needs.push(need.clone());
            }
        }
        let lines = script.text.lines().count();
        script.text.extend(std::iter::repeat_n('\n', block.line - 1 - lines));
        script.text.push_str(&block.text);
    }
    scripts.into_iter().map(|(_, script)| script).collect()
}

/// Returns the commands of a block, without comments.
pub fn commands(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(place: Place, is_root: bool, group: Option<&str>, needs: &[&str]) -> Marker {
        let needs = needs.iter().map(|need| (*need).to_owned()).collect();
        Marker::Runs { place, is_root, group: group.map(str::to_owned), needs }
    }

    #[test]
    fn block_has_line_marker_and_text() {
        let page = "# Title\n\n<!-- runs: local root group=a needs=curl,ip -->\n```sh\none\n  two\n```\n\
                    text\n<!-- shows: a reason -->\n```sh\nthree\n```\n```text\nno commands\n```\n";
        let blocks = parse(page).unwrap();
        let marker = runs(Place::Local, true, Some("a"), &["curl", "ip"]);
        assert_eq!(blocks[0], Block { line: 5, marker, text: "one\n  two\n".to_owned() });
        assert_eq!(
            blocks[1],
            Block { line: 11, marker: Marker::Shows, text: "three\n".to_owned() }
        );
        assert_eq!(blocks.len(), 2);
    }

    #[test]
    fn block_without_marker_is_a_problem() {
        for (page, line) in [
            ("text\n```sh\nls\n```\n", "line 2:"),
            ("```console\n$ ls\n```\n", "line 1:"),
            ("<!-- runs: local -->\n\n```sh\nls\n```\n", "line 1:"),
            ("<!-- runs: local -->\n```text\nls\n```\n", "line 1:"),
            ("text:\n\n    ringfence ps\n", "line 3:"),
        ] {
            let problems = parse(page).unwrap_err();
            assert!(problems[0].starts_with(line), "{page}{problems:?}");
        }
    }

    #[test]
    fn malformed_marker_is_a_problem() {
        for marker in [
            "runs:",
            "runs: moon",
            "runs: local user",
            "runs: local group=",
            "shows:",
            "runs: local needs=a,,b",
        ] {
            let page = format!("<!-- {marker} -->\n```sh\nls\n```\n");
            assert!(parse(&page).unwrap_err()[0].starts_with("line 1:"), "{marker}");
        }
        assert_eq!(parse("<!-- a comment -->\ntext\n"), Ok(vec![]));
    }

    #[test]
    fn blocks_of_a_group_are_one_script_with_the_lines_of_the_page() {
        let block = |line, group, needs: &[&str], text: &str| Block {
            line,
            marker: runs(Place::Local, false, group, needs),
            text: text.to_owned(),
        };
        let scripts = scripts(&[
            block(3, Some("a"), &["curl"], "one\ntwo\n"),
            block(6, None, &[], "alone\n"),
            block(9, Some("a"), &["curl", "ip"], "three\n"),
            Block { line: 12, marker: Marker::Shows, text: "never\n".to_owned() },
            Block { line: 14, marker: runs(Place::Xen, true, None, &[]), text: "far\n".to_owned() },
        ]);
        assert_eq!(scripts.len(), 2);
        assert_eq!(
            (scripts[0].line, &scripts[0].needs[..]),
            (3, &["curl".to_owned(), "ip".to_owned()][..])
        );
        assert_eq!(scripts[0].text, "\n\none\ntwo\n\n\n\n\nthree\n");
        assert_eq!(scripts[1].text.lines().nth(5), Some("alone"));
    }

    #[test]
    fn last_command_of_a_trace_has_a_line() {
        let text = "\n\nls \"$a\"\nringfence wait web\nringfence stop web\n".to_owned();
        let script = Script { line: 3, is_root: false, needs: vec![], text };
        assert_eq!(script.last_line("+ ls x\n+ ringfence wait web\nringfence: wait: why\n"), 4);
        assert_eq!(script.last_line("no trace"), 3);
    }

    #[test]
    fn commands_are_lines_without_comments() {
        assert_eq!(commands("# first\nls -l    # list\n\ncat a\n"), ["ls -l", "cat a"]);
    }
}
