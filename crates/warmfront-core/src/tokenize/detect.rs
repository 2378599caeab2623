//! Which content format a template wants: one string a message, or a list of parts.
//!
//! The engine decides by the shape of the template: a loop over the content of a message means parts. This is the same
//! walk over the syntax tree, with the same gaps: scopes are ignored, a form the engine's walk cannot follow counts as
//! `string`. Being cleverer here would give other tokens than the engine.

use std::collections::HashSet;

use minijinja::machinery::{WhitespaceConfig, ast, parse};
use minijinja::syntax::SyntaxConfig;

use super::version::Version;

/// How message content reaches the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// Text parts joined by newlines.
    String,
    /// A list of `{"type": "text", "text": ...}`.
    Parts,
}

/// The engine's walk met a form that it does not follow.
struct Unfollowed;

/// Decides for one template source (already without `generation` tags).
pub(super) fn content_format(source: &str, version: Version) -> ContentFormat {
    let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let Ok(root) = parse(source, "chat", SyntaxConfig, whitespace) else {
        return ContentFormat::String;
    };
    let mut nodes = Nodes::default();
    nodes.statement(&root);
    match nodes.loops_over_content(version) {
        Ok(true) => ContentFormat::Parts,
        Ok(false) | Err(Unfollowed) => ContentFormat::String,
    }
}

/// Everything of a template that the walk looks at, in source order.
#[derive(Default)]
struct Nodes<'t> {
    assignments: Vec<&'t ast::Set<'t>>,
    loops: Vec<(&'t ast::ForLoop<'t>, Option<usize>)>,
    macros: Vec<&'t ast::Macro<'t>>,
    calls: Vec<&'t ast::Call<'t>>,
    inside: Option<usize>,
}

impl<'t> Nodes<'t> {
    fn statements(&mut self, statements: &'t [ast::Stmt<'t>]) {
        for statement in statements {
            self.statement(statement);
        }
    }

    fn statement(&mut self, statement: &'t ast::Stmt<'t>) {
        use ast::Stmt;
        match statement {
            Stmt::Template(node) => self.statements(&node.children),
            Stmt::EmitExpr(node) => self.expression(&node.expr),
            Stmt::ForLoop(node) => {
                self.loops.push((node, self.inside));
                self.expression(&node.iter);
                self.statements(&node.body);
                self.statements(&node.else_body);
                self.optional(node.filter_expr.as_ref());
            }
            Stmt::IfCond(node) => {
                self.expression(&node.expr);
                self.statements(&node.true_body);
                self.statements(&node.false_body);
            }
            Stmt::WithBlock(node) => {
                node.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&node.body);
            }
            Stmt::Set(node) => {
                self.assignments.push(node);
                self.expression(&node.expr);
            }
            Stmt::SetBlock(node) => {
                self.optional(node.filter.as_ref());
                self.statements(&node.body);
            }
            Stmt::FilterBlock(node) => {
                self.expression(&node.filter);
                self.statements(&node.body);
            }
            Stmt::AutoEscape(node) => self.statements(&node.body),
            Stmt::Block(node) => self.statements(&node.body),
            Stmt::Macro(node) => self.definition(node),
            Stmt::CallBlock(node) => {
                self.call(&node.call);
                self.statements(&node.macro_decl.body);
            }
            Stmt::Do(node) => self.call(&node.call),
            _ => {}
        }
    }

    fn definition(&mut self, node: &'t ast::Macro<'t>) {
        let outer = self.inside.replace(self.macros.len());
        self.macros.push(node);
        self.statements(&node.body);
        self.inside = outer;
    }

    fn call(&mut self, call: &'t ast::Call<'t>) {
        self.calls.push(call);
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &'t [ast::CallArg<'t>]) {
        for argument in arguments {
            let (ast::CallArg::Pos(value)
            | ast::CallArg::Kwarg(_, value)
            | ast::CallArg::PosSplat(value)
            | ast::CallArg::KwargSplat(value)) = argument;
            self.expression(value);
        }
    }

    fn optional(&mut self, expression: Option<&'t ast::Expr<'t>>) {
        if let Some(expression) = expression {
            self.expression(expression);
        }
    }

    fn expression(&mut self, expression: &'t ast::Expr<'t>) {
        use ast::Expr;
        match expression {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(node) => {
                self.expression(&node.expr);
                for part in [&node.start, &node.stop, &node.step] {
                    self.optional(part.as_ref());
                }
            }
            Expr::UnaryOp(node) => self.expression(&node.expr),
            Expr::BinOp(node) => {
                self.expression(&node.left);
                self.expression(&node.right);
            }
            Expr::Compare(node) => {
                self.expression(&node.expr);
                node.ops.iter().for_each(|operand| self.expression(&operand.expr));
            }
            Expr::IfExpr(node) => {
                self.expression(&node.test_expr);
                self.expression(&node.true_expr);
                self.optional(node.false_expr.as_ref());
            }
            Expr::Filter(node) => {
                self.optional(node.expr.as_ref());
                self.arguments(&node.args);
            }
            Expr::Test(node) => {
                self.expression(&node.expr);
                self.arguments(&node.args);
            }
            Expr::GetAttr(node) => self.expression(&node.expr),
            Expr::GetItem(node) => {
                self.expression(&node.expr);
                self.expression(&node.subscript_expr);
            }
            Expr::Call(node) => self.call(node),
            Expr::List(node) => node.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(node) => {
                node.keys.iter().chain(&node.values).for_each(|item| self.expression(item));
            }
        }
    }

    fn loops_over_content(&self, version: Version) -> Result<bool, Unfollowed> {
        let messages = self.names_of_messages(version)?;
        let mut message_names = Vec::new();
        for (node, _) in &self.loops {
            if messages.iter().any(|name| is_variable_or_part(&node.iter, name, None)) {
                message_names.push(variable(&node.target).ok_or(Unfollowed)?);
            }
        }
        let holds_content =
            |expr: &ast::Expr| message_names.iter().any(|name| is_variable_or_part(expr, name, Some("content")));
        let content_parameters: Vec<HashSet<&str>> =
            self.macros.iter().map(|node| self.content_parameters(node, &holds_content)).collect();
        for (node, inside) in &self.loops {
            let by_name = variable(&node.iter).is_some_and(|name| match inside {
                Some(slot) => content_parameters[*slot].contains(name.as_str()),
                None => name == "content",
            });
            if holds_content(&node.iter) || by_name {
                return variable(&node.target).map(|_| true).ok_or(Unfollowed);
            }
        }
        Ok(false)
    }

    /// `messages` and every name that it, or a slice or filter of it, is assigned to.
    fn names_of_messages(&self, version: Version) -> Result<Vec<String>, Unfollowed> {
        let mut names = vec!["messages".to_owned()];
        let mut at = 0;
        while at < names.len() {
            for node in &self.assignments {
                if !is_variable_or_part(&node.expr, &names[at], None) {
                    continue;
                }
                let name = match variable(&node.target) {
                    Some(name) if !name.contains('.') || version >= Version::NAMESPACE_DETECTION => name,
                    _ => return Err(Unfollowed),
                };
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            at += 1;
        }
        Ok(names)
    }

    /// Parameters of a macro that some call fills with the content of a message.
    fn content_parameters(
        &self,
        node: &ast::Macro<'t>,
        holds_content: &dyn Fn(&ast::Expr) -> bool,
    ) -> HashSet<&'t str> {
        let parameters: Vec<&str> = node
            .args
            .iter()
            .filter_map(|parameter| match parameter {
                ast::Expr::Var(name) => Some(name.id),
                _ => None,
            })
            .collect();
        let mut found = HashSet::new();
        for call in &self.calls {
            if variable(&call.expr).as_deref() != Some(node.name) {
                continue;
            }
            let mut position = 0;
            for argument in &call.args {
                match argument {
                    ast::CallArg::Pos(value) => {
                        if let Some(parameter) = parameters.get(position).filter(|_| holds_content(value)) {
                            found.insert(*parameter);
                        }
                        position += 1;
                    }
                    ast::CallArg::Kwarg(name, value) if holds_content(value) => {
                        found.extend(parameters.iter().find(|parameter| *parameter == name));
                    }
                    _ => {}
                }
            }
        }
        found
    }
}

/// The name of a plain variable, or `namespace.attribute`.
fn variable(expression: &ast::Expr) -> Option<String> {
    match expression {
        ast::Expr::Var(name) => Some(name.id.to_owned()),
        ast::Expr::GetAttr(node) => match &node.expr {
            ast::Expr::Var(outer) => Some(format!("{}.{}", outer.id, node.name)),
            _ => None,
        },
        _ => None,
    }
}

/// Whether the expression is the variable (or its `key`), perhaps filtered, tested or sliced.
fn is_variable_or_part(expression: &ast::Expr, name: &str, key: Option<&str>) -> bool {
    use ast::Expr;
    match expression {
        Expr::Filter(node) => node.expr.as_ref().is_some_and(|inner| is_variable_or_part(inner, name, key)),
        Expr::Test(node) => is_variable_or_part(&node.expr, name, key),
        Expr::Slice(node) => is_variable_or_part(&node.expr, name, key),
        Expr::GetAttr(node) if key == Some(node.name) => variable(&node.expr).as_deref() == Some(name),
        Expr::GetItem(node) => match (&node.subscript_expr, key) {
            (Expr::Const(constant), Some(key)) => {
                constant.value.as_str() == Some(key) && variable(&node.expr).as_deref() == Some(name)
            }
            _ => false,
        },
        _ => key.is_none() && variable(expression).as_deref() == Some(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(source: &str) -> ContentFormat {
        content_format(source, Version::default())
    }

    // bug 155
    #[test]
    fn a_loop_over_the_content_of_a_message_means_parts() {
        for source in [
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "{% for m in messages[1:] %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}",
            "{% set x = messages %}{% for m in x %}{% for p in m.content %}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "{% macro show(n, c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(1, c=m['content']) }}{% endfor %}",
        ] {
            assert_eq!(format(source), ContentFormat::Parts, "{source}");
        }
    }

    #[test]
    fn other_templates_want_strings() {
        for source in [
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
            "{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for k, v in m.content %}{% endfor %}{% endfor %}",
            "{% broken",
        ] {
            assert_eq!(format(source), ContentFormat::String, "{source}");
        }
    }

    #[test]
    fn namespaces_are_followed_from_the_version_on_that_follows_them() {
        let source = "{% set ns.all = messages %}{% for m in ns.all %}{% for p in m.content %}{% endfor %}{% endfor %}";
        assert_eq!(format(source), ContentFormat::Parts);
        assert_eq!(content_format(source, Version::parse("0.32.0")), ContentFormat::String);
    }
}
