# Writes a C++ source with the files of the report page as string literals:
#   cmake -DOUT=FILE -DPARTS=HTML;CSS;JS[;CHART_CSS;CHART_JS;CHART_LICENCE] -P embed_page.cmake
set(texts "")
foreach(index RANGE 5)
  list(LENGTH PARTS count)
  set(text "")
  if(index LESS count)
    list(GET PARTS ${index} path)
    file(READ ${path} text)
  endif()
  set(part_${index} "${text}")
endforeach()
# Splits the text into literals of 16,000 bytes, because the length of a literal is limited. No file contains the
# delimiter.
function(as_literal out text)
  string(LENGTH "${text}" length)
  set(literal "")
  set(at 0)
  while(at LESS length)
    string(SUBSTRING "${text}" ${at} 16000 piece)
    string(APPEND literal "R\"TESSERA_PAGE(${piece})TESSERA_PAGE\"\n")
    math(EXPR at "${at} + 16000")
  endwhile()
  if(literal STREQUAL "")
    set(literal "\"\"")
  endif()
  set(${out} "${literal}" PARENT_SCOPE)
endfunction()
set(licence "")
if(NOT part_5 STREQUAL "")
  set(licence "/*\n${part_5}*/\n")
endif()
as_literal(html "${part_0}")
as_literal(style "${part_1}")
as_literal(script "${part_2}")
as_literal(chart_style "${part_3}")
as_literal(chart_script "${licence}${part_4}")
file(WRITE ${OUT}.new "#include \"tessera/report/page_parts.h\"

namespace tessera::report {

const PageParts& page_parts() {
  static constexpr PageParts parts{
      .html = ${html},
      .style = ${style},
      .script = ${script},
      .chart_style = ${chart_style},
      .chart_script = ${chart_script}};
  return parts;
}

}  // namespace tessera::report
")
file(RENAME ${OUT}.new ${OUT})
