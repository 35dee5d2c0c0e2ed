//! YAML documents as trees of texts, lists and maps with their lines. Bounded in depth; aliases are refused.

use saphyr_parser::{Event, Parser};

/// Maximum depth of lists and maps.
const DEPTH_MAX: usize = 64;

/// Node of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Line in which it begins.
    pub(super) line: usize,
    pub(super) value: Value,
}

/// Contents of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// Text, number or other scalar, as it is written.
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

/// Defects for which a text is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum YamlError {
    #[error("line {line}: this is no YAML: {message}")]
    Form { line: usize, message: String },
    #[error("line {line}: more than {DEPTH_MAX} lists and maps in each other")]
    Depth { line: usize },
    #[error("line {line}: write the value itself in place of an alias")]
    Alias { line: usize },
    #[error("line {line}: a key is a text")]
    Key { line: usize },
}

impl Node {
    /// Returns the value of a key, if this is a map that has it.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.entries().iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// Returns the entries of a map; of other nodes none.
    pub(super) fn entries(&self) -> &[(String, Node)] {
        if let Value::Map(entries) = &self.value { entries } else { &[] }
    }

    /// Returns the nodes of a list; of other nodes none.
    pub(super) fn items(&self) -> &[Node] {
        if let Value::List(items) = &self.value { items } else { &[] }
    }

    /// Returns the text of a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        if let Value::Text(text) = &self.value { Some(text) } else { None }
    }
}

/// List or map that is not complete, with the key that waits for its value.
struct Open {
    node: Node,
    key: Option<String>,
}

/// Parses the documents of a text.
///
/// # Errors
///
/// Returns the first defect, with its line.
pub(super) fn documents(text: &str) -> Result<Vec<Node>, YamlError> {
    let (mut documents, mut open): (Vec<Node>, Vec<Open>) = (Vec::new(), Vec::new());
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| YamlError::Form {
            line: error.marker().line(),
            message: error.info().to_owned(),
        })?;
        let line = span.start.line();
        let begins = |value| Open { node: Node { line, value }, key: None };
        let complete = match event {
            Event::SequenceStart(..) => {
                open.push(begins(Value::List(Vec::new())));
                None
            }
            Event::MappingStart(..) => {
                open.push(begins(Value::Map(Vec::new())));
                None
            }
            Event::SequenceEnd | Event::MappingEnd => open.pop().map(|open| open.node),
            Event::Scalar(text, ..) => Some(Node { line, value: Value::Text(text.into_owned()) }),
            Event::Alias(_) => return Err(YamlError::Alias { line }),
            _ => None,
        };
        if open.len() > DEPTH_MAX {
            return Err(YamlError::Depth { line });
        }
        let Some(node) = complete else { continue };
        match open.last_mut() {
            None => documents.push(node),
            Some(parent) => parent.add(node)?,
        }
    }
    Ok(documents)
}

impl Open {
    fn add(&mut self, node: Node) -> Result<(), YamlError> {
        match (&mut self.node.value, self.key.take()) {
            (Value::List(items), _) => items.push(node),
            (Value::Map(entries), Some(key)) => entries.push((key, node)),
            (_, None) => match node.value {
                Value::Text(key) => self.key = Some(key),
                _ => return Err(YamlError::Key { line: node.line }),
            },
            (Value::Text(_), Some(_)) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn documents_are_trees_with_lines() {
        let found = documents("a: 1\nb:\n- x\n- {c: 'd'}\n---\ne\n").unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].get("a").unwrap().text(), Some("1"));
        let list = found[0].get("b").unwrap();
        assert_eq!((list.items().len(), list.items()[1].line), (2, 4));
        assert_eq!(list.items()[1].get("c").unwrap().text(), Some("d"));
        assert!(found[1].text() == Some("e") && found[1].items().is_empty());
    }

    #[test]
    fn text_without_the_form_is_refused_with_its_line() {
        let deep = "[".repeat(10_000);
        for (text, line) in
            [("a: [1\nb", 3), ("a: &x 1\nb: *x\n", 2), ("? [a]\n: b", 1), (&deep, 1)]
        {
            let error = documents(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("line {line}: ")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_panic(text in "([a-c]|[-:?,&*!|>%@'\"#\\[\\]{}]|\n| |\t|---|\\PC){0,60}") {
            let _ = documents(&text);
        }
    }
}
