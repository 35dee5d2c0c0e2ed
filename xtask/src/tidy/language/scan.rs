//! Names and comments in shell scripts and in C.
//!
//! The scanners know as much of the syntax as that takes. In a shell script each word outside quotes is a name: of a
//! variable, a function, a program, a guest. Text in quotes and in here-documents is left out, because it is printed or is
//! the input of another program.

/// Part of a line that is a name or a comment, and its line, counted from 1.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Name(usize, String),
    Comment(usize, String),
}

/// Returns `true` if a file is a shell script, by its name or its first line.
pub(super) fn is_shell(path: &str, text: &str) -> bool {
    let interpreters = ["#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env bash", "#!/usr/bin/env sh"];
    path.ends_with(".sh") || interpreters.iter().any(|line| text.starts_with(line))
}

/// Returns `true` if a file is a source or a header of C.
pub(super) fn is_c(path: &str) -> bool {
    path.ends_with(".c") || path.ends_with(".h")
}

/// State of a scanner between two characters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum In {
    Code,
    /// Quotes that end with this character.
    Quotes(char),
    /// A comment to the end of the line.
    Line,
    /// A comment of C to `*/`.
    Block,
}

/// Collector of parts. Words of code and comments end with their line.
struct Collector {
    line: usize,
    name: String,
    comment: String,
    parts: Vec<Part>,
}

impl Collector {
    fn new() -> Collector {
        Collector { line: 1, name: String::new(), comment: String::new(), parts: vec![] }
    }

    /// Adds a character of code: a name grows by it, or ends.
    fn code(&mut self, c: char) {
        if c.is_alphanumeric() || c == '_' {
            self.name.push(c);
        } else {
            self.end_name();
        }
    }

    fn end_name(&mut self) {
        if !self.name.is_empty() {
            self.parts.push(Part::Name(self.line, std::mem::take(&mut self.name)));
        }
    }

    fn end_comment(&mut self) {
        if !self.comment.trim().is_empty() {
            self.parts.push(Part::Comment(self.line, self.comment.trim().to_owned()));
        }
        self.comment.clear();
    }

    fn end_line(&mut self) {
        self.end_name();
        self.end_comment();
        self.line += 1;
    }
}

/// Returns the names and comments of a shell script.
pub(super) fn shell(text: &str) -> Vec<Part> {
    let mut parts = Collector::new();
    let mut state = In::Code;
    let mut until: Vec<String> = vec![];
    for line in text.lines() {
        if let Some(end) = until.first() {
            if line.trim_start_matches('\t') == end {
                until.remove(0);
            }
            parts.line += 1;
            continue;
        }
        let outside = state == In::Code;
        let mut before = ' ';
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            match state {
                In::Code if c == '#' && (before.is_whitespace() || before == ';') => {
                    state = In::Line
                }
                In::Code if c == '\\' => {
                    parts.end_name();
                    chars.next();
                }
                In::Code if c == '\'' || c == '"' => {
                    parts.end_name();
                    state = In::Quotes(c);
                }
                In::Code => parts.code(c),
                In::Quotes('"') if c == '\\' => drop(chars.next()),
                In::Quotes(end) if c == end => state = In::Code,
                In::Quotes(_) => {}
                In::Line | In::Block => parts.comment.push(c),
            }
            before = c;
        }
        if state == In::Line {
            state = In::Code;
        }
        if outside {
            until.extend(here_documents(line));
        }
        parts.end_line();
    }
    parts.parts
}

/// Returns the end marks of the here-documents that begin after a line: `<<EOF`, `<<-EOF`, `<<'EOF'`, but not `<<<`.
fn here_documents(line: &str) -> Vec<String> {
    let mut marks = vec![];
    for (at, _) in line.match_indices("<<") {
        if line[..at].ends_with('<') || line[..at].ends_with('(') {
            continue;
        }
        let rest = line[at + 2..].trim_start_matches('-').trim_start();
        let rest = rest.trim_start_matches(['\'', '"', '\\']);
        let mark: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if mark.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            marks.push(mark);
        }
    }
    marks
}

/// Returns the names and comments of a source of C.
pub(super) fn c(text: &str) -> Vec<Part> {
    let mut parts = Collector::new();
    let mut state = In::Code;
    for line in text.lines() {
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match state {
                In::Code if c == '/' && chars.peek() == Some(&'/') => state = In::Line,
                In::Code if c == '/' && chars.peek() == Some(&'*') => state = In::Block,
                In::Code if c == '\'' || c == '"' => state = In::Quotes(c),
                In::Code => parts.code(c),
                In::Quotes(_) if c == '\\' => drop(chars.next()),
                In::Quotes(end) if c == end => state = In::Code,
                In::Quotes(_) => {}
                In::Block if c == '*' && chars.peek() == Some(&'/') => {
                    chars.next();
                    parts.end_comment();
                    state = In::Code;
                }
                In::Line | In::Block => parts.comment.push(c),
            }
        }
        if state != In::Block {
            state = In::Code;
        }
        parts.end_line();
    }
    parts.parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(parts: &[Part]) -> Vec<&str> {
        let mut names = vec![];
        for part in parts {
            if let Part::Name(_, name) = part {
                names.push(name.as_str());
            }
        }
        names
    }

    fn comments(parts: &[Part]) -> Vec<(usize, &str)> {
        let mut comments = vec![];
        for part in parts {
            if let Part::Comment(line, text) = part {
                comments.push((*line, text.as_str()));
            }
        }
        comments
    }

    #[test]
    fn shell_has_names_outside_quotes_and_comments() {
        let parts =
            shell("#!/bin/sh\nguest_of() { # one guest\n\tA=$b \"$c # d\" 'e' f\\ g $#\n}\n");
        assert_eq!(names(&parts), ["guest_of", "A", "b", "f", "g"]);
        assert_eq!(comments(&parts), [(1, "!/bin/sh"), (2, "one guest")]);
    }

    #[test]
    fn quotes_of_shell_span_lines() {
        let parts = shell("on guest 'a\n# b\nit' c # d\n");
        assert_eq!(names(&parts), ["on", "guest", "c"]);
        assert_eq!(comments(&parts), [(3, "d")]);
    }

    #[test]
    fn here_document_is_left_out() {
        let parts =
            shell("cat <<EOF >a\nit's b # c\nEOF\nd <<'X' <<-Y\n1\nX\n\tY\ne $((1 << 2))\n");
        assert_eq!(names(&parts), ["cat", "EOF", "a", "d", "Y", "e", "1", "2"]);
        assert_eq!(comments(&parts), []);
    }

    #[test]
    fn c_has_names_and_comments_outside_strings() {
        let text = "/* first\n * second */ int a_b = '\"'; // third\nf(\"x /* y\", 'z');\n#include <q.h>\n";
        let parts = c(text);
        assert_eq!(names(&parts), ["int", "a_b", "f", "include", "q", "h"]);
        let found = comments(&parts);
        assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 2, 2]);
        assert!(found[0].1.contains("first") && found[2].1.contains("third"), "{found:?}");
    }

    #[test]
    fn script_is_known_by_its_name_or_first_line() {
        assert!(is_shell("vm/lib/run.sh", ""));
        assert!(is_shell("dist/vif", "#!/bin/sh -e\n"));
        assert!(!is_shell("clients/peer.py", "#!/usr/bin/env python3\n"));
        assert!(is_c("xen/a.h") && !is_c("xen/a.patch"));
    }
}
