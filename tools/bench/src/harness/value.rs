//! Value of one field of a row.

use serde::{Serialize, Serializer};

/// Value of a field, in JSON and in the table.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Value {
    /// The field is not in the JSON object. The table shows a dash.
    Omitted,
    /// `null` in JSON, a dash in the table.
    Null,
    Flag(bool),
    Signed(i64),
    Unsigned(u64),
    Number(f64),
    Text(String),
    /// Arrays, maps, and enumerations with names of their own.
    Compound(serde_json::Value),
}

impl Value {
    /// Converts a value to its JSON form.
    pub(crate) fn json(value: &impl Serialize) -> Value {
        serde_json::to_value(value).map_or(Value::Null, Value::Compound)
    }

    /// Converts an optional value; a field without one is omitted.
    pub(crate) fn if_some(value: Option<impl Into<Value>>) -> Value {
        value.map_or(Value::Omitted, Into::into)
    }

    pub(crate) fn is_omitted(&self) -> bool {
        *self == Value::Omitted
    }

    /// Formats the value for a table. Numbers are divided by `unit` and rounded to `digits`.
    pub(crate) fn text(&self, unit: f64, digits: usize) -> String {
        match self {
            Value::Omitted | Value::Null => "-".to_owned(),
            Value::Flag(flag) => flag.to_string(),
            Value::Signed(number) => number.to_string(),
            Value::Unsigned(number) => number.to_string(),
            Value::Number(number) => format!("{:.digits$}", number / unit),
            Value::Text(text) => text.clone(),
            Value::Compound(serde_json::Value::String(text)) => text.clone(),
            Value::Compound(compound) => compound.to_string(),
        }
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Omitted | Value::Null => serializer.serialize_none(),
            Value::Flag(flag) => serializer.serialize_bool(*flag),
            Value::Signed(number) => serializer.serialize_i64(*number),
            Value::Unsigned(number) => serializer.serialize_u64(*number),
            Value::Number(number) => serializer.serialize_f64(*number),
            Value::Text(text) => serializer.serialize_str(text),
            Value::Compound(compound) => compound.serialize(serializer),
        }
    }
}

macro_rules! from {
    ($($from:ty => $variant:ident),* $(,)?) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Value {
                Value::$variant(value.into())
            }
        }
    )*};
}

from! {
    bool => Flag, i64 => Signed, u16 => Unsigned, u32 => Unsigned, u64 => Unsigned, f64 => Number,
    &str => Text, String => Text,
}

impl From<usize> for Value {
    fn from(value: usize) -> Value {
        Value::Unsigned(value as u64)
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::Null, Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_value_is_null_or_omitted_and_a_dash_in_text() {
        assert_eq!(Value::from(None::<f64>), Value::Null);
        assert_eq!(Value::if_some(None::<f64>), Value::Omitted);
        assert_eq!(Value::if_some(Some(2.0)), Value::Number(2.0));
        assert_eq!(Value::Null.text(1.0, 2), "-");
    }

    #[test]
    fn numbers_are_scaled_and_rounded_in_text_only() {
        let value = Value::from(12_345.0);
        assert_eq!(value.text(1e3, 1), "12.3");
        assert_eq!(serde_json::to_string(&value).unwrap(), "12345.0");
        assert_eq!(Value::from(12_345u32).text(1e3, 1), "12345");
    }

    #[test]
    fn compound_names_are_shown_without_quotes() {
        assert_eq!(Value::json(&"tx").text(1.0, 0), "tx");
        assert_eq!(Value::json(&[1.5, 2.0]).text(1.0, 0), "[1.5,2.0]");
    }
}
